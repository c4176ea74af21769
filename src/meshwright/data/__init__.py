"""Files as documents of tokens: records, templates, chats, and stores of tokens on the disk. Imports no JAX."""

from meshwright.data.bad_data import Rule, describe_bad
from meshwright.data.document import Dataset, Document
from meshwright.data.encoding import find_encoder
from meshwright.data.sources import FileSource, StoreSource, find_files, find_source, parse_sources
from meshwright.data.store import PreferencePairs, TokenStore
from meshwright.data.template import parse_templates
from meshwright.data.tokenizing import Tokenizing, tokenize

__all__ = [
    "Dataset",
    "Document",
    "FileSource",
    "PreferencePairs",
    "Rule",
    "StoreSource",
    "TokenStore",
    "Tokenizing",
    "describe_bad",
    "find_encoder",
    "find_files",
    "find_source",
    "parse_sources",
    "parse_templates",
    "tokenize",
]
