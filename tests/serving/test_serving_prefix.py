"""Pages and the prefix cache against a model that tries every prefix of every text, and order of eviction."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshwright.serving.engine.pages import PagePool, first_needed_page
from meshwright.serving.engine.prefix import PrefixCache

COUNT = 24
"""Pages of each pool: few, so that texts do not fit and pages are evicted."""


def test_pages_are_taken_shared_and_released():
    pool = PagePool(3)
    assert pool.allocate(4) is None
    pages = pool.allocate(3)
    assert pages is not None
    assert sorted(pages) == [0, 1, 2]
    pool.share([pages[0], None])
    pool.release([*pages, None])
    assert (pool.num_free, pool.num_references(pages[0])) == (2, 1)
    pool.release(pages[:1])
    assert pool.num_free == 3
    assert pool.allocate(0) == []


@pytest.mark.parametrize("misuse", [PagePool.release, PagePool.share])
def test_a_free_page_is_neither_released_nor_shared(misuse):
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(RuntimeError, match=f"page {pages[0]} is .* but it is free"):
        misuse(pool, pages)


@pytest.mark.parametrize(("position", "window", "first"), [(9, None, 0), (9, 4, 1), (10, 4, 1), (11, 4, 2), (2, 4, 0)])
def test_the_first_page_that_a_window_reads(position, window, first):
    """In pages of 4: the token at 10 reads those at 7 to 10."""
    assert first_needed_page(position, window, 4) == first


class Text:
    """A text that runs: for each group its pages, None where it holds none."""

    def __init__(self, salt, tokens, pages):
        self.salt, self.tokens, self.pages = salt, tokens, pages


class CacheMachine(RuleBasedStateMachine):
    """Texts that come and go, beside a cache of flat dicts which is searched by trying everything."""

    @initialize(windows=st.sampled_from([(None,), (None, 4), (3,), (1, None), (2, 5, None)]), size=st.integers(1, 3))
    def start(self, windows, size):
        self.windows, self.size = windows, size
        self.pools = [PagePool(COUNT) for _ in windows]
        self.cache = PrefixCache(size, self.pools, windows)
        self.nodes = {}  # (salt, tokens of the pages up to this one) -> page of each group
        self.used = [{} for _ in windows]  # of each group: such a name -> when it was last used
        self.clock = 0
        self.texts = []
        self.copied = []  # by group, while the pages of a hit are still to be copied
        self.content = {}  # (group, page) -> the salt and the tokens up to its end

    def touch(self, group, name):
        self.clock += 1
        self.used[group][name] = self.clock

    def enough(self, tokens, salt, length):
        """Whether pages that later tokens read are all in the model, but for the one that the prefix ends inside."""
        names = [(salt, tokens[: end + self.size]) for end in range(0, length - self.size + 1, self.size)]
        return all(name in self.nodes for name in names) and all(
            self.nodes[name][group] is not None
            for group, window in enumerate(self.windows)
            for name in names[first_needed_page(length, window, self.size) :]
        )

    def longest(self, tokens, salt, limit, min_copied):
        for length in range(limit, 0, -1):
            inside = length % self.size
            if not self.enough(tokens, salt, length):
                continue
            needs = [
                g for g, w in enumerate(self.windows) if first_needed_page(length, w, self.size) <= length // self.size
            ]
            if not inside or (
                inside >= min_copied
                and any(
                    s == salt
                    and len(known) == length - inside + self.size
                    and known[:length] == tokens[:length]
                    and all(pages[group] is not None for group in needs)
                    for (s, known), pages in self.nodes.items()
                )
            ):
                return length
        return 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        salt=st.sampled_from(["a", None]),
        min_copied=st.integers(1, 3),
    )
    def begin(self, tokens, salt, min_copied):
        hit = self.cache.match(tokens, limit=len(tokens) - 1, salt=salt, min_copied=min_copied)
        assert hit.length == self.longest(tokens, salt, len(tokens) - 1, min_copied)
        whole = hit.length // self.size
        assert bool(hit.copies) == (hit.length % self.size > 0)
        for group, window in enumerate(self.windows):
            first = first_needed_page(hit.length, window, self.size)
            assert [page is None for page in hit.pages[group]] == [at < first for at in range(whole)]
            for at, page in enumerate(hit.pages[group]):
                if page is not None:
                    assert self.content[group, page] == (salt, tokens[: (at + 1) * self.size])
            if hit.copies and hit.copies[group] is not None:
                of, known = self.content[group, hit.copies[group]]
                assert (of, known[: hit.length]) == (salt, tokens[: hit.length])
                self.touch(group, (salt, known))
            for at in reversed(range(first, whole)):
                self.touch(group, (salt, tokens[: (at + 1) * self.size]))
        self.texts.append(Text(salt, tokens, hit.pages))
        self.copied = hit.copies
        count = -(-len(tokens) // self.size) - whole
        for group, pool in enumerate(self.pools):
            if pool.num_free < count:
                self.evict(group, count - pool.num_free)
        taken = [pool.allocate(count) for pool in self.pools]
        for group, page in enumerate(self.copied):
            self.pools[group].release([page])
        self.copied = []
        for group, pages in enumerate(taken):
            for number, page in enumerate(pages or ()):
                self.content[group, page] = (salt, tokens[: (whole + number + 1) * self.size])
            self.texts[-1].pages[group] += pages or []
        if None in taken:
            self.end(None, self.texts[-1])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), share=st.integers(0, 4))
    def compute(self, data, share):
        """A text is inserted as far as it is computed, having left the pages that its window has left."""
        text = data.draw(st.sampled_from(self.texts))
        computed = len(text.tokens) * share // 4
        for group, window in enumerate(self.windows):
            first = first_needed_page(computed, window, self.size)
            self.pools[group].release(text.pages[group][:first])
            text.pages[group][:first] = [None] * len(text.pages[group][:first])
        self.cache.insert(text.tokens[:computed], text.pages, text.salt)
        for at in reversed(range(computed // self.size)):
            name = (text.salt, text.tokens[: (at + 1) * self.size])
            pages = self.nodes.setdefault(name, [None] * len(self.windows))
            for group, own in enumerate(text.pages):
                if own[at] is not None:
                    pages[group] = own[at] if pages[group] is None else pages[group]
                    self.touch(group, name)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def end(self, data, text=None):
        text = text or data.draw(st.sampled_from(self.texts))
        self.texts.remove(text)
        for pool, pages in zip(self.pools, text.pages, strict=True):
            pool.release(pages)

    def in_use(self, group, page):
        return page in self.copied[group : group + 1] or any(page in text.pages[group] for text in self.texts)

    def inner(self, name):
        salt, tokens = name
        return any(s == salt and len(t) > len(tokens) and t[: len(tokens)] == tokens for s, t in self.nodes)

    @precondition(lambda self: not self.texts)
    @rule(group=st.integers(0, 2), count=st.integers(1, 6))
    def evict_idle(self, group, count):
        """With no text running, every page can be freed."""
        group %= len(self.windows)
        cached = len(self.used[group])
        assert self.evict(group, count) == min(count, cached)

    @rule(group=st.integers(0, 2), count=st.integers(1, 6))
    def evict_some(self, group, count):
        self.evict(group % len(self.windows), count)

    def evict(self, group, count):
        before = self.pools[group].num_free
        freed = self.cache.evict(group, count)
        assert self.pools[group].num_free - before == freed <= count
        gone = passed = 0
        while gone < count and passed < len(self.used[group]):
            name = min(self.used[group], key=self.used[group].__getitem__)
            inner = self.inner(name)
            if self.in_use(group, self.nodes[name][group]) or (inner and self.windows[group] is None):
                self.touch(group, name)
                passed += 1
                continue
            for other in range(len(self.windows)) if not inner else (group,):
                self.nodes[name][other] = None
                self.used[other].pop(name, None)
            if not inner:
                del self.nodes[name]
            gone, passed = gone + 1, 0
        assert gone == freed
        return freed

    @rule()
    def clear(self):
        self.cache.clear()
        self.nodes = {}
        self.used = [{} for _ in self.windows]

    @invariant()
    def references_are_those_of_texts_and_of_the_cache(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.num_nodes == len(self.nodes)
        for group, pool in enumerate(self.pools):
            held = [p for text in self.texts for p in text.pages[group]] + [p[group] for p in self.nodes.values()]
            assert [pool.num_references(page) for page in range(COUNT)] == [held.count(page) for page in range(COUNT)]
            assert pool.num_free == COUNT - len(set(held) - {None})

    def teardown(self):
        if hasattr(self, "cache"):
            for text in list(self.texts):
                self.end(None, text)
            self.cache.clear()
            assert [pool.num_free for pool in self.pools] == [COUNT] * len(self.pools)


def cached(cache, pools, tokens, salt=None):
    """How long a prefix of a text is cached; the references to it are given back."""
    hit = cache.match(tokens, limit=len(tokens), salt=salt)
    for group, pool in enumerate(pools):
        pool.release([*hit.pages[group], *hit.copies[group : group + 1]])
    return hit.length


def insert(cache, pools, tokens, size, salt=None):
    """Cache a text whose pages nobody else holds afterwards."""
    pages = [pool.allocate(len(tokens) // size) for pool in pools]
    cache.insert(tokens, pages, salt)
    for pool, of_group in zip(pools, pages, strict=True):
        pool.release(of_group)


def test_leaves_go_by_last_use_and_a_prefix_after_all_that_continue_it():
    pools = [PagePool(8)]
    cache = PrefixCache(2, pools, (None,))
    common, first, second = [1, 2], [1, 2, 3, 4], [1, 2, 5, 6]
    insert(cache, pools, first, 2)
    insert(cache, pools, second, 2)
    insert(cache, pools, [7, 8], 2)
    assert cached(cache, pools, first) == 4
    assert cache.evict(0, 2) == 2
    assert [text for text in (first, second, [7, 8]) if cached(cache, pools, text) == len(text)] == [first]
    assert cache.evict(0, 1) == 1
    assert cached(cache, pools, first) == len(common)
    assert cache.evict(0, 5) == 1
    assert pools[0].num_free == 8


def test_a_page_in_use_is_passed_over():
    pools = [PagePool(4)]
    cache = PrefixCache(1, pools, (None,))
    insert(cache, pools, [1], 1)
    insert(cache, pools, [2], 1)
    hit = cache.match([1, 1], limit=1)
    insert(cache, pools, [3], 1)
    assert cache.evict(0, 1) == 1
    assert cache.evict(0, 3) == 1
    pools[0].release(hit.pages[0])
    assert cached(cache, pools, [1]) == 1
    assert cache.evict(0, 3) == 1


def test_a_window_loses_the_pages_that_no_hit_read_for_longest():
    """After a hit on the first half of a text, whose window reads the fourth page, this page goes last."""
    pools = [PagePool(8), PagePool(8)]
    cache = PrefixCache(1, pools, (None, 2))
    text = list(range(8))
    insert(cache, pools, text, 1)
    hit = cache.match([*text[:4], 9], limit=4)
    assert hit.pages[1][:3] == [None] * 3
    for pool, pages in zip(pools, hit.pages, strict=True):
        pool.release(pages)
    assert cache.evict(1, 7) == 7
    assert (pools[0].num_free, pools[1].num_free) == (4, 7)
    assert cached(cache, pools, text) == 4


def test_a_gap_in_a_window_is_filled_by_a_text_that_still_holds_the_page():
    pools = [PagePool(8), PagePool(8)]
    cache = PrefixCache(1, pools, (None, 3))
    pages = [pool.allocate(3) for pool in pools]
    cache.insert([1, 2, 3], [pages[0], [None, None, pages[1][2]]])
    assert cached(cache, pools, [1, 2, 3]) == 0
    cache.insert([1, 2], [pages[0], [None, pages[1][1]]])
    assert cached(cache, pools, [1, 2, 3]) == 3


def test_a_text_without_a_page_that_its_layers_read_is_refused():
    pools = [PagePool(1)]
    with pytest.raises(RuntimeError, match="page 0 of a text is missing"):
        PrefixCache(1, pools, (None,)).insert([1], [[None]])


def test_hits_and_their_tokens_are_counted():
    pools = [PagePool(4)]
    cache = PrefixCache(2, pools, (None,))
    insert(cache, pools, [1, 2, 3, 4], 2)
    lengths = [cached(cache, pools, tokens) for tokens in ([1, 2, 3, 9, 9], [5, 6], [1, 2])]
    assert lengths == [3, 0, 2]
    assert (cache.num_lookups, cache.num_hits, cache.num_tokens, cache.num_cached_tokens) == (3, 2, 9, 5)


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_the_cache_is_what_a_model_says = CacheMachine.TestCase
