"""Small files of every format, and a tokenizer with a chat template."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder, *, template=TEMPLATE):
    """A tokenizer of bytes and special tokens, that begins every text with <s> (256) and ends it with </s> (257)."""
    vocab = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(path, records):
    """JSON lines; text stands as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def write_parquet(path, records):
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
    return path


def write_arrow(folder, records):
    """A folder as `datasets.Dataset.save_to_disk` writes it: an Arrow stream and two JSON files."""
    folder.mkdir()
    table = pa.Table.from_pylist(records)
    path = str(folder / "data-00000-of-00001.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=4)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder
