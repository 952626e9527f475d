import pytest

from cb_rollout import ConfigurationError, InvalidRequestError, RolloutConfig, SamplingParams
from cb_rollout.config.nearest import nearest_names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_num_seq", "max_requests_per_batch"),
        ("max_num_seqs", "max_requests_per_batch"),
        ("max_nums_seqs", "max_requests_per_batch"),
        ("kv_cache_blocks", "num_blocks"),
        ("cache_blocks", "num_blocks"),
        ("gpu_memory_utilisation", "max_memory_percent"),
        ("memory_fraction", "max_memory_percent"),
        ("mem_fraction_static", "max_memory_percent"),
        ("maximum_model_len", "max_model_len"),
        ("max_seq_len", "max_model_len"),
        ("requests_per_batch", "max_requests_per_batch"),
        ("verify_steps", "verify_every_steps"),
        ("num_record_sequences", "record_num_sequences"),
        ("weights_sync", "weight_sync"),
        ("block_sharing", "allow_block_sharing"),
        ("top_p", "SamplingParams(top_p=...)"),
    ],
)
def test_an_unknown_setting_is_answered_with_what_it_means(name, meant):
    with pytest.raises(ConfigurationError) as error:
        RolloutConfig(**{name: 1})
    question = str(error.value).partition("did you mean ")[2]
    assert repr(meant) in question
    assert question.count("'") <= 6
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_model_len", "RolloutConfig(max_model_len=...)"), ("stop_words", "stop")],
)
def test_an_unknown_sampling_parameter_is_answered_with_what_it_means(name, meant):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: 1})
    assert repr(meant) in str(error.value)


def test_a_name_like_no_other_has_no_answer():
    assert nearest_names("zzz", ["block_size", "num_blocks"], {}) == []
    assert nearest_names("max_num", ["block_size"], {}) == []


def test_names_that_share_as_many_words_are_all_named():
    known = ["keep_size", "keep_ratio", "cache_dir"]
    assert nearest_names("what_somebody_wants_to_keep_here", known, {}) == [
        "keep_size",
        "keep_ratio",
    ]
