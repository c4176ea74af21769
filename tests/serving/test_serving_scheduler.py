"""The scheduler alone: no device is needed to see which pages a sequence has."""

from serving_cases import drawn_model

from meshwright.serving.engine.layout import engine_layout
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.scheduler import PageCopy, Scheduler
from meshwright.serving.engine.sequence import TokenSequence
from meshwright.serving.engine.settings import EngineLayout, EngineSettings

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


def scheduler_of(rows, **options):
    layout = EngineLayout(
        context=64, page_size=4, shards=1, rows=rows, windows=(None,), pages=(16 * rows,), widths=(16,),
        decoded=(rows,), chunks=((rows, 8),), **options,
    )  # fmt: skip
    return Scheduler(layout)


def sequence_of(order, *, owner="", group="", max_tokens=16, **options):
    request = Request(prompt=[order + 1] * 4, max_tokens=max_tokens, owner=owner, group=group, **options)
    return TokenSequence(f"r{order}", 0, request, list(request.prompt), order)


def run_round(scheduler):
    """The steps of a round, whose tokens are read at once."""
    steps = list(scheduler.steps())
    for step in steps:
        for part in step.slices:
            if part.is_chosen:
                scheduler.append_tokens(part.sequence, [7])
    return steps


def test_a_request_without_a_row_takes_one_of_a_request_with_many():
    scheduler = scheduler_of(4)
    hog = [sequence_of(number, group="hog") for number in range(40)]
    for sequence in hog:
        scheduler.add(sequence)
    run_round(scheduler)
    assert [each.order for each in scheduler.running] == [0, 1, 2, 3]
    late = sequence_of(40, max_tokens=1)
    scheduler.add(late)
    run_round(scheduler)
    assert late.num_generated == 1
    # Of the hog's the youngest gave way, with what it had made.
    assert [each.order for each in scheduler.running] == [0, 1, 2, 40]
    assert hog[3].tokens[4:] == [7, 7]
    late.done = "length"
    scheduler.end(late)
    run_round(scheduler)
    assert hog[3].row is not None


def test_requests_of_one_completion_wait_for_each_other_in_their_order():
    scheduler = scheduler_of(2)
    for number in range(4):
        scheduler.add(sequence_of(number))
    for _ in range(3):
        run_round(scheduler)
    assert [each.order for each in scheduler.running] == [0, 1]
    assert scheduler.counters.preempted == 0


def test_owners_have_equal_shares_however_many_requests_each_sends():
    scheduler = scheduler_of(4)
    for number in range(20):
        scheduler.add(sequence_of(number, owner="many"))
    run_round(scheduler)
    for number in range(20, 24):
        scheduler.add(sequence_of(number, owner="few"))
    run_round(scheduler)
    assert sorted(each.request.owner for each in scheduler.running) == ["few", "few", "many", "many"]


def test_prompts_to_score_and_others_are_read_in_turns():
    scheduler = scheduler_of(4)
    for number in range(2):
        scored = sequence_of(number, max_tokens=0, prompt_logprobs=1)
        scored.tokens, scored.is_scored = [1] * 40, True
        scheduler.add(scored)
    other = sequence_of(2, max_tokens=1)
    scheduler.add(other)
    kinds = [step.is_scored for _ in range(3) for step in run_round(scheduler)]
    assert kinds[:2] in ([True, False], [False, True])


def test_a_step_scores_several_short_texts():
    layout, _ = engine_layout(drawn_model(), EngineSettings(rows=64, context=128, chunk_tokens=1024))
    scheduler = Scheduler(layout)
    for number in range(16):
        scored = sequence_of(number, max_tokens=0, prompt_logprobs=1)
        scored.is_scored = True
        scheduler.add(scored)
    assert [len(step.slices) for _ in range(2) for step in run_round(scheduler)] == [8, 8]


def test_only_requests_with_the_same_salt_share_a_prefix():
    scheduler = scheduler_of(4)
    for salt, known in (("a", 0), ("b", 0), ("a", 3)):
        sequence = sequence_of(0, max_tokens=1, cache_salt=salt)
        scheduler.add(sequence)
        run_round(scheduler)
        assert sequence.cached == known
        scheduler.end(sequence)
