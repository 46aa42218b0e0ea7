# SPDX-License-Identifier: MIT
"""How many decode steps a burst has: by what the requests ask for, and by measured times."""

import sys

import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from oss_fused.plugin.burst import SECONDS, BurstScheduler, StepTimes
from tests.plugin.burst_schedulers import HASHER, add, engine_config, make, small, steps


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return engine_config(tmp_path_factory.mktemp("model"))


def test_a_burst_ends_with_the_longest_request(config):
    scheduler = make(config, BurstScheduler, small())
    add(scheduler, "a", [1, 2, 3], 20)
    # the prompt's token, 16 in two bursts, and the last three
    assert steps(scheduler, 6) == [1, 8, 8, 3]
    add(scheduler, "b", [1, 2, 3], 2)
    add(scheduler, "c", [1, 2, 3], 12)
    assert steps(scheduler, 4) == [1, 8, 3]


def test_a_burst_stays_within_the_models_length(config):
    scheduler = make(config, BurstScheduler, small(length=32))
    add(scheduler, "a", [1] * 20, 12)
    add(scheduler, "b", [2, 3, 4], 29)
    # the first request has room for three more, the second one wants eight
    assert steps(scheduler, 6) == [1, 8, 3, 8, 8, 1]


def test_a_request_whose_last_token_is_under_way_is_left_out(config):
    scheduler = make(config, BurstScheduler, small())
    add(scheduler, "a", [1, 2, 3], 12)
    add(scheduler, "b", [1, 2, 4], 60)
    assert steps(scheduler, 2) == [1, 8]
    for names in ({"a", "b"}, {"b"}):
        scheduled = scheduler.schedule()
        assert set(scheduled.num_scheduled_tokens) == names and scheduled.burst == 8


def test_a_prompt_in_pieces_and_an_arrival_take_single_steps(config):
    scheduler = make(config, BurstScheduler, small(budget=32))
    add(scheduler, "a", [1, 2, 3], 100)
    assert steps(scheduler, 2) == [1, 8]
    add(scheduler, "b", list(range(90)), 100)
    # three pieces of 31 tokens, since each step also decodes a token of the first request
    assert steps(scheduler, 5) == [1, 1, 1, 8, 8]


def read(scheduler, number):
    """Tokens of each request in ``number`` steps."""
    tokens = []
    for _ in range(number):
        scheduled = scheduler.schedule()
        tokens.append(scheduled.num_scheduled_tokens)
        names = list(scheduled.num_scheduled_tokens)
        ids = [[5] * (scheduler.requests[n].num_output_placeholders > 0) for n in names]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, ids)
        scheduler.update_from_output(scheduled, output)
    return tokens


def test_short_prompts_fill_no_more_than_their_limit(config):
    scheduler = make(config, BurstScheduler, small(burst=1, budget=64, caching=False))
    scheduler.most_short = 32
    for name in "abcdef":
        add(scheduler, name, list(range(7)), 9)
    # the first prompts' tokens come with the first step
    first = {"a": 7, "b": 7, "c": 7, "d": 7, "e": 4}
    assert read(scheduler, 2) == [first, dict.fromkeys("abcd", 1) | {"e": 3, "f": 7}]
    add(scheduler, "g", list(range(90)), 1)
    assert read(scheduler, 1)[0]["g"] == 64 - len("abcdef")


@pytest.mark.parametrize("tokens", [8, 9])
def test_prompts_above_a_quarter_of_the_limit_are_not_cut(config, tokens):
    scheduler = make(config, BurstScheduler, small(burst=1, budget=64, caching=False))
    scheduler.most_short = 32
    for name in "abcdef":
        add(scheduler, name, list(range(tokens)), 9)
    assert sum(read(scheduler, 1)[0].values()) == (32 if tokens == 8 else 54)


def test_the_rest_of_a_long_prompt_is_not_cut(config):
    scheduler = make(config, BurstScheduler, small(burst=1, budget=64, caching=False))
    scheduler.most_short = 32
    for name, tokens in (("a", 130), ("b", 5), ("c", 5)):
        add(scheduler, name, list(range(tokens)), 9)
    # with 2 tokens left of the first one, the others are short
    assert read(scheduler, 3) == [{"a": 64}, {"a": 64}, {"a": 2, "b": 5, "c": 5}]


def test_steps_of_short_prompts_are_limited_only_where_it_is_worth_it(config, monkeypatch):
    graphs = config.compilation_config
    for mode, sizes, most in [
        (CUDAGraphMode.FULL_AND_PIECEWISE, [1, 8, 4096], 4096),
        (CUDAGraphMode.FULL, [8192, 1], 4096),
        (CUDAGraphMode.PIECEWISE, [1, 512], sys.maxsize),
        (CUDAGraphMode.FULL_DECODE_ONLY, [1, 4096], sys.maxsize),
        (CUDAGraphMode.NONE, [], sys.maxsize),
        (None, None, sys.maxsize),
    ]:
        monkeypatch.setattr(graphs, "cudagraph_mode", mode)
        monkeypatch.setattr(graphs, "cudagraph_capture_sizes", sizes)
        assert make(config, BurstScheduler, small()).most_short == most


def test_prompts_are_read_beside_many_requests_that_decode(config):
    """With 3 drafts they fill more than half of the limit."""
    scheduler = make(config, BurstScheduler, small(burst=1, budget=64, caching=False))
    scheduler.most_short, scheduler.num_spec_tokens = 32, 3
    for name in "abcde":
        add(scheduler, name, [1, 2, 3], 40)
    read(scheduler, 2)
    for name in "fg":
        add(scheduler, name, list(range(8)), 9)
    assert read(scheduler, 1) == [dict.fromkeys("abcde", 4) | {"f": 8, "g": 8}]


@pytest.mark.parametrize(
    "changes", [{"enable_chunked_prefill": False}, {"disable_chunked_mm_input": True}]
)
def test_no_limit_where_prompts_may_not_be_cut(config, changes, monkeypatch):
    """One that is longer than the limit would wait while the request before it waits, too."""
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", CUDAGraphMode.PIECEWISE)
    monkeypatch.setattr(config.compilation_config, "cudagraph_capture_sizes", [1, 4096])
    assert make(config, BurstScheduler, small()).most_short == 4096
    for name, value in changes.items():
        monkeypatch.setattr(config.scheduler_config, name, value)
    assert make(config, BurstScheduler, small()).most_short == sys.maxsize


def test_a_full_server_goes_on_in_bursts(config):
    scheduler = make(config, BurstScheduler, small(places=2))
    for name in "abc":
        add(scheduler, name, [1, 2, 3], 17)
    # the third one is let in when the others have ended
    assert steps(scheduler, 8) == [1, 8, 8, 1, 8, 8]


@pytest.mark.parametrize(("blocks", "bursts"), [(17, True), (16, False)])
def test_no_request_is_preempted_for_anothers_later_tokens(blocks, bursts, config):
    # both prompts take 7 blocks, and both need one more for 16 tokens: two are free, or one
    scheduler = make(config, BurstScheduler, small(blocks=blocks, caching=False, burst=16))
    add(scheduler, "a", [1] * 100, 60)
    add(scheduler, "b", [2] * 100, 60)
    # the prompts take four steps of 64 tokens
    assert steps(scheduler, 5, depth=1) == [1, 1, 1, 1, 16 if bursts else 1]
    assert not any(request.num_preemptions for request in scheduler.requests.values())


def test_a_request_that_needs_the_host_stops_bursts_while_it_runs(config):
    scheduler = make(config, BurstScheduler, small(places=2))
    add(scheduler, "a", [1, 2, 3], 100)
    assert steps(scheduler, 2) == [1, 8]
    add(scheduler, "b", [1, 2, 3], 3, {"logprobs": 1})
    assert steps(scheduler, 5) == [1, 1, 1, 8, 8]
    # one that waits for a place stops nothing
    add(scheduler, "c", [1, 2, 3], 60)
    add(scheduler, "d", [1, 2, 3], 3, {"logprobs": 1})
    assert steps(scheduler, 3) == [1, 8, 8]


def test_auto_takes_what_fits_into_the_time(config):
    scheduler = make(config, BurstScheduler, small(burst=16))
    scheduler.auto = True
    add(scheduler, "a", [1] * 3, 200)
    # nothing is known of the first decode steps
    slow = ((1, SECONDS / 3.5),)
    assert steps(scheduler, 5, decode_times=slow) == [1, 1, 3, 3, 3]
    # one slow step changes nothing
    assert steps(scheduler, 1, decode_times=((1, 1.0),)) == [3]
    assert steps(scheduler, 2, decode_times=slow) == [3, 3]
    # another batch size has times of its own
    add(scheduler, "b", [1] * 3, 200)
    assert steps(scheduler, 4, decode_times=((2, SECONDS / 2),)) == [1, 1, 2, 2]


def test_auto_never_takes_more_than_the_longest(config):
    scheduler = make(config, BurstScheduler, small(burst=16))
    scheduler.auto = True
    add(scheduler, "a", [1] * 3, 200)
    assert steps(scheduler, 5, decode_times=((1, SECONDS / 99),)) == [1, 1, 16, 16, 16]


def test_times_of_steps():
    times = StepTimes()
    assert times.get(1) is None
    for seconds in (1.0, 2.0, 9.0):
        times.add(5, seconds)
    assert times.get(5) == times.get(8) == 2.0
    assert times.get(4) is None and times.get(9) is None
    for _ in range(5):
        times.add(8, 3.0)
    assert times.get(5) == 3.0


def test_the_end_of_a_session_is_not_noted(config):
    """A session gets its prompt in several messages; the last one frees it while it waits."""
    scheduler = make(config, BurstScheduler, small())

    def message(tokens, resumable):
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
        return Request("s", tokens, params, None, block_hasher=HASHER, resumable=resumable)

    scheduler.add_request(message([1, 2, 3], True))
    steps(scheduler, 6)
    scheduler.add_request(message([0], False))
    assert not scheduler.requests and not scheduler._host_bound
