"""A vision-language model that several processes train under FSDP2 is rolled out from whole."""

import pytest
from processes import run_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks():
    return run_processes("distributed/vision_rollouts.py")


def test_rollouts_about_pictures_are_those_of_a_process_that_trains_alone(ranks):
    for loop in (rank["loop"] for rank in ranks):
        assert all(loop["same_tokens"])
        assert max(loop["differences"]) <= 1e-5
        # Two sequences with pictures: a forward without would leave the tower's parts alone.
        assert loop["drift"] <= 1e-5
        assert loop["num_verified"] == 2 * 6


def test_a_sync_covers_the_tower_and_drops_prefixes_of_pictures(ranks):
    for loop in (rank["loop"] for rank in ranks):
        assert loop["bytes"] == [loop["bytes_of_the_model"]] * len(loop["bytes"])
        assert loop["tower_apart"] <= 1e-6
        # So keys of an older tower would have been seen above.
        assert loop["effect_of_the_tower"] > 1e-3
        assert loop["encoded"][::2] == [loop["num_images"]] * len(loop["bytes"])


def test_a_stock_trainer_learns_from_pictures_what_trls_path_learns(ranks):
    for trained in (rank["trainer"] for rank in ranks):
        assert trained["is_copy"]
        assert len(trained["drift"]) == 2
        assert max(trained["drift"]) <= 1e-5
        assert all(trained["shared"])
        assert trained["norm"] > 0.01
        assert trained["losses"] <= 1e-5
        assert max(trained["gradients"]) <= 1e-5
        assert trained["weights"] <= 1e-6
