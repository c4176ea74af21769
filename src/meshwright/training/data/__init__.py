"""Data: text as tokens, and the batch of any step."""

from meshwright.training.data.batches import Batches
from meshwright.training.data.config import DataConfig
from meshwright.training.data.corpus import BYTES, check_corpus, load_corpus, read_texts

__all__ = ["BYTES", "Batches", "DataConfig", "check_corpus", "load_corpus", "read_texts"]
