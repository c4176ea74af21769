"""The scheduler alone: no device is needed to see which pages a sequence has."""

from meshwright.serving.request import Request
from meshwright.serving.scheduler import PageCopy, Scheduler
from meshwright.serving.sequence import TokenSequence
from meshwright.serving.settings import EngineLayout

LAYOUT = EngineLayout(
    context=16, page_size=4, shards=1, rows=2, windows=(None, 8), pages=(8, 8), widths=(4,), decoded=(2,),
    chunks=((2, 8),),
)  # fmt: skip


def test_a_sequence_that_ends_drops_its_own_page_copies_alone():
    scheduler = Scheduler(LAYOUT)
    # Others have pages of the layers without a window, so that the sequence's own have other numbers there.
    scheduler.pools[0][0].allocate(2)
    sequence = TokenSequence("a", 0, Request(prompt=[1] * 8, max_tokens=4), [1] * 8, 0)
    scheduler.add(sequence)
    assert len(list(scheduler.steps())) == 1
    page = sequence.pages[1][0]
    assert page not in sequence.pages[0]
    own, of_another = PageCopy(0, window=1, source=7, target=page), PageCopy(0, window=0, source=7, target=page)
    scheduler._copies = [own, of_another]
    scheduler._release_pages(sequence)
    assert scheduler._copies == [of_another]
