"""Drafts by n-grams against a search of the whole text."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from meshwright.serving.engine.drafts import NgramDrafts


def searched(tokens, most, longest, shortest):
    """The draft, by looking for each n-gram from the end of the text."""
    for size in range(min(longest, len(tokens)), shortest - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[len(tokens) - size :]:
                draft = list(tokens)
                for at in range(most):
                    draft.append(draft[begin + size + at])
                return draft[len(tokens) :]
    return []


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    parts=st.lists(st.integers(1, 5), max_size=4),
    most=st.integers(0, 6),
    longest=st.integers(1, 4),
    shortest=st.integers(1, 2),
)
def test_a_draft_is_what_followed_the_last_tokens_before(tokens, parts, most, longest, shortest):
    drafts, begin = NgramDrafts([], longest=longest, shortest=shortest), 0
    for part in [*parts, len(tokens)]:
        drafts.extend(tokens[begin : begin + part])
        begin += part
        assert drafts.draft(most) == searched(tokens[:begin], most, longest, shortest)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # the longest n-gram
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # its latest occurrence
        ([5, 6, 7, 5], [6, 7, 5]),  # a shorter one
        ([4, 4], [4, 4, 4]),  # a repetition continues
        ([1, 2, 3], []),
        ([], []),
    ],
)
def test_drafts_of_three_tokens(tokens, draft):
    assert NgramDrafts(tokens, longest=3).draft(3) == draft


def test_texts_do_not_share_tokens():
    tokens = [1, 2, 1]
    drafts = NgramDrafts(tokens)
    tokens.append(2)
    assert drafts.draft(1) == [2]
