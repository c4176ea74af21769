"""docs/frameworks.md has the tables of options as the data have them. To write it anew: run this file."""

from pathlib import Path

from meshwright.planning.exchange.tables import exchange_names, load_table

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
HEADING = "## All options\n"
ORDER = ("maxtext", "lwm", "easylm", "torchtitan", "megatron", "levanter")


def here(field):
    """A field as users of the command type it."""
    if "." in field:
        return f"{field.partition('.')[2]} of the {'experts' if field.startswith('experts') else 'model'}"
    name = "dtype" if field == "compute_dtype" else field.replace("_", "-")
    return f"`--{name}`"


def of_words(words):
    """The words of an option, each with what it means; alone where that is the same word."""
    shown = {word or "empty": "off" if ours == "" else str(ours).lower() for word, ours in words.items()}
    return ", ".join(word if word == ours else f"{word}: {ours}" for word, ours in shown.items())


def rows(table):
    """The options of a framework, each with what it is here."""
    yield from table.parts.items()
    yield from ((option, here(field)) for option, field in table.numbers.items())
    for option, meaning in table.words.items():
        ((field, words),) = meaning.items()
        yield option, f"{here(field)} ({of_words(words)})"
    yield from (
        (option, f"{values[0]}, of a model read from sizes".lower()) for option, values in table.structure.items()
    )
    yield from (
        (option, f"{value if value != '' else 'empty'} alone: {why}") for option, (value, why) in table.only.items()
    )
    for reason, patterns in table.nothing.items():
        yield " ".join(patterns), f"no effect here: {reason}"


def as_typed(option, kind):
    """An option as users of its framework type it: a flag, or a key in its section of TOML."""
    section, _, key = option.rpartition(".")
    return f"--{option}" if kind == "flags" else f"[{section}] {key}" if kind == "toml" and section else option


def tables():
    """The section of the page with all tables."""
    parts = [HEADING]
    for name in ORDER:
        table = load_table(name)
        lines = [
            f"### {table.title}\n",
            f"Checked against {table.source}.\n",
            f"| {table.title} | here |",
            "| --- | --- |",
        ]
        for options, ours in rows(table):
            typed = ", ".join(f"`{as_typed(option, table.format)}`" for option in options.split())
            lines.append(f"| {typed} | {ours.replace('|', ' ')} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def test_the_page_has_the_tables_of_the_data():
    text = PAGE.read_text()
    assert {*ORDER} == {*exchange_names()}
    assert text[text.index(HEADING) :] == tables()


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(HEADING)] + tables())
