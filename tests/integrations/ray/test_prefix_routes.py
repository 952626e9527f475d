"""The table of prefixes keeps the latest."""

from cb_rollout.integrations.ray.dispatcher import CHUNK_TOKENS, PrefixRoutes

PROMPT = list(range(2 * CHUNK_TOKENS))


def test_the_latest_links_are_kept():
    routes = PrefixRoutes(max_links=4)
    routes.add(0, 0, [1, *PROMPT])
    routes.add(1, 0, [2, *PROMPT])
    # Used again.
    routes.add(1, 0, [1, *PROMPT])
    routes.add(0, 0, [3, *PROMPT])
    assert len(routes) == 4
    assert routes.longest({0, 1}, 0, [1, *PROMPT]) == (2 * CHUNK_TOKENS, {0, 1})
    assert routes.longest({1, 2}, 0, [1, *PROMPT]) == (2 * CHUNK_TOKENS, {1})
    assert routes.longest({0, 1}, 0, [2, *PROMPT]) == (0, {0, 1})
    assert routes.longest({0, 1}, 1, [1, *PROMPT]) == (0, {0, 1})
