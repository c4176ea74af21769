"""Answer a file of prompts with an engine, one JSON line per prompt. If the process is killed, a second call continues.

Answers are written as they finish, each with the number of its prompt's line: written in order, a long answer would
delay later ones and leave rows of the batch idle. Prompts that already have a line in the file of answers are not
answered again. A second file next to the answers records the prompts and options from which they were generated.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import BadData, BadRecordError, Rule
from meshwright.execution.data.records import FORMATS, kind_of, ranges, read_records
from meshwright.execution.models.inference.loaded import Chat, LoadedModel, Prompt
from meshwright.execution.models.inference.prompts import as_message, prompt_of
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.request import Output, Request
from meshwright.support.files import append_line, check_output, write_error, write_file

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""Sampling options that a line may set, besides max_tokens."""


@dataclass(frozen=True)
class PromptFile:
    """A file of prompts, one per line (JSON lines) or row (Parquet, Arrow).

    Args:
        model: the model that answers, with its tokenizer.
        request: options for lines that do not set their own; its prompt is not used.
        context: maximum number of tokens of a prompt and its answer.
        as_chat: whether a text prompt is sent as a user's chat message.
        weights: origin of the model's weights, recorded so that another model's answers are not continued.
    """

    path: Path
    model: LoadedModel
    request: Request
    context: int
    as_chat: bool = False
    weights: str = ""

    def requests(self, bad: BadData) -> Iterator[tuple[int, Request]]:
        """Yield (line number from 1, request) for each usable line; unusable lines are added to `bad`."""
        kind = kind_of(self.path)
        if kind not in FORMATS:
            raise MeshwrightError(f"{self.path} is not a file of prompts; --data takes .jsonl, .parquet and .arrow")
        records = (record for part in ranges(self.path, kind) for record in read_records(part))
        for line, record in enumerate(records, start=1):
            try:
                if isinstance(record, BadRecordError):
                    raise record
                request = self._request(record)
            except BadRecordError as error:
                bad.add(error, f"{self.path}, {'line' if kind == 'jsonl' else 'row'} {line:,}")
            else:
                yield line, request

    def _request(self, record: Mapping[str, Any]) -> Request:
        own = {name: record[name] for name in ("max_tokens", *SAMPLING) if record.get(name) is not None}
        rest = {name: value for name, value in record.items() if name not in ("max_tokens", *SAMPLING)}
        tokens = self._tokens(prompt_of(rest))
        if (length := len(tokens) + 1) > self.context:
            raise BadRecordError(
                "too_long",
                f"the prompt has {length:,} tokens with the first generated one; a sequence has {self.context:,}",
            )
        most = own.pop("max_tokens", self.request.max_tokens)
        if type(most) is not int or most < 1:
            raise BadRecordError("missing_field", f"max_tokens is {most!r}; it is a whole number, 1 or more")
        try:
            sampling = replace(self.request.sampling, **own)
        except MeshwrightError as error:
            raise BadRecordError("missing_field", str(error)) from None
        return replace(self.request, prompt=tokens, max_tokens=most, sampling=sampling)

    def _tokens(self, prompt: Prompt) -> list[int]:
        try:
            json.dumps(asdict(prompt) if isinstance(prompt, Chat) else prompt, ensure_ascii=False).encode()
            return self.model.encode(as_message(prompt) if self.as_chat else prompt).tolist()
        except UnicodeEncodeError:
            raise BadRecordError("invalid_utf8", "a text has half a character (a surrogate)") from None
        except MeshwrightError as error:
            is_tokens = not isinstance(prompt, str | Chat) and isinstance(prompt[0], int)
            raise BadRecordError("over_vocab" if is_tokens else "chat", str(error)) from None


@dataclass
class Progress:
    """Progress of answering a file.

    Args:
        prompts: number of usable prompts in the file.
        skipped: number of unusable lines left out, by kind (`BadRecordError`).
        before: prompts answered by earlier calls.
        answered: prompts answered by this call.
        tokens: tokens generated by this call.
    """

    prompts: int
    skipped: dict[str, int]
    before: int
    answered: int = 0
    tokens: int = 0


def answer_file(
    engine: Engine,
    prompts: PromptFile,
    answers: Path,
    *,
    rule: Rule = "error",
    on_start: Callable[[], None] = lambda: None,
    on_answer: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer each unanswered prompt of a file with a line `{"line", "texts"}` in the file `answers`.

    `line` is the number of the prompt's line, and `texts` a list with an object for each completion (`_text`).

    Args:
        engine: the engine, which has not started.
        rule: how to treat an unusable line; all lines are checked before the first answer.
        on_start: called before the first request, to start the engine; not called if all are answered.
        on_answer: called after each line written.

    Raises:
        MeshwrightError: a line is bad under the rule `error`; `answers` is for other prompts or options, or another
            process writes it; or a file cannot be read or written.
    """
    bad = BadData(rule)
    lines = [0, 0]
    for line, _ in prompts.requests(bad):
        lines = [line, lines[1] + 1]
    if not lines[1]:
        raise MeshwrightError(f"{prompts.path} has no prompt; it holds one a line")
    # All that determines the answers: prompts, model and options, but not the mesh.
    with prompts.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    own = asdict(replace(prompts.request, prompt=()))
    model = {"model": prompts.model.config.name, "weights": prompts.weights, "dtype": prompts.model.dtype}
    said = {"prompts": digest, **model, "context": prompts.context, "chat": prompts.as_chat, **own.pop("sampling")}
    with _locked(answers, json.loads(json.dumps(said | own))):
        done = _done_lines(answers, lines[0])
        progress = Progress(lines[1], dict(bad.counts), sum(done))
        if progress.before < progress.prompts:
            on_start()
            left = ((line, request) for line, request in prompts.requests(BadData(rule)) if not done[line])
            for line, texts in _answers(engine, left, prompts.request.num_completions):
                append_line(answers, json.dumps({"line": line, "texts": texts}))
                progress.answered += 1
                progress.tokens += sum(len(text["tokens"]) for text in texts)
                on_answer(progress)
    return progress


def _answers(
    engine: Engine, requests: Iterator[tuple[int, Request]], num_completions: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (line number, texts) for each request, once all its completions have ended.

    Up to twice as many sequences as the engine has rows are queued at a time, so that a free row is filled at once and
    memory does not grow with the file.
    """
    layout = engine.layout
    most = max(1, min(2 * layout.shards * layout.rows, engine.settings.max_queue) // num_completions)
    news = SimpleQueue[tuple[int, list[Output]]]()
    waiting = dict[int, list[Output]]()
    while True:
        while len(waiting) < most and (asked := next(requests, None)) is not None:
            line, request = asked
            waiting[line] = []
            engine.submit(request, lambda outputs, line=line: news.put((line, [*outputs])))
        if not waiting:
            return
        line, outputs = news.get()
        if ended := [output for output in outputs if output.done in ("aborted", "failed")]:
            raise MeshwrightError(f"line {line:,} was not answered: {ended[0].error or 'the engine has ended'}")
        waiting[line] += outputs
        if sum(output.done is not None for output in waiting[line]) == num_completions:
            made = waiting.pop(line)
            completions = range(num_completions)
            yield line, [_text(engine, [o for o in made if o.completion == number]) for number in completions]


def _text(engine: Engine, outputs: list[Output]) -> dict[str, Any]:
    """Return one completion as {"tokens", "text", "stopped_by"}, as in `generate --json`. outputs: its outputs."""
    return {
        "tokens": [token for output in outputs for token in output.tokens],
        "text": "".join(output.text for output in outputs) if engine.model.tokenizer else None,
        "stopped_by": outputs[-1].done,
    }


@contextmanager
def _locked(answers: Path, origin: dict[str, Any]) -> Iterator[None]:
    """Hold the lock of the origin file inside the context, and check that the file records `origin`.

    The origin file is next to the answers. It records the prompts and options of the answers, and is written before the
    first one.
    """
    check_output(answers)
    beside = answers.with_name(answers.name + ".origin.json")
    if not beside.exists():
        if answers.exists() and answers.stat().st_size:
            raise MeshwrightError(f"{answers} is there, and not of this command; move it, or name another with -o")
        write_file(beside, json.dumps(origin, indent=2) + "\n")
    with beside.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeshwrightError(f"another process writes {answers}; wait until it is done") from None
        try:
            before = json.loads(file.read())
            other = sorted(name for name in origin if before.get(name) != origin[name])
        except (ValueError, AttributeError):
            raise MeshwrightError(f"{beside} is broken; move it and {answers} to begin anew") from None
        if other:
            changed = ", ".join("the file of prompts" if name == "prompts" else name for name in other)
            raise MeshwrightError(
                f"{answers} was begun with another value of: {changed}; call it as before, or name another with -o"
            )
        yield


def _done_lines(answers: Path, last: int) -> bytearray:
    """Return 1 at index n if line n of the prompts has an answer, else 0. A partial last answer is cut from the file.

    last: the number of the last line with a prompt.
    """
    done = bytearray(last + 1)
    if not answers.exists():
        return done
    whole = 0
    try:
        with answers.open("rb+") as file:
            for number, data in enumerate(file, start=1):
                if not data.endswith(b"\n"):
                    break
                try:
                    line = json.loads(data)["line"]
                    if type(line) is not int or not 0 < line <= last or done[line]:
                        raise ValueError
                except (ValueError, KeyError, TypeError):
                    raise MeshwrightError(
                        f"{answers}, line {number:,} is not an answer to these prompts; move the file to begin anew"
                    ) from None
                done[line] = 1
                whole += len(data)
            if whole < file.seek(0, os.SEEK_END):
                file.truncate(whole)
    except OSError as error:
        raise write_error(answers, error) from None
    return done
