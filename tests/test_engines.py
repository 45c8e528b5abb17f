"""Both engines keep one contract: the right rows of the right layer of the right prompt, or an error."""

import functools
import json
import logging
import queue
import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import hsray
from hsray.engine import CaptureEngine, EngineDied, EngineKilled, open_engine
from hsray.engine_sglang import OWN_ARGS, SAFE_ARGS
from hsray.layers import Layer, resolve_layers
from tests.builds import unique_prompts
from tests.processes import schedulers
from tests.reference import MAX_TOKENS, counted_calls, hugging_face_states, options_for, relative_error

#: Where both compute in float32, rounding may differ by the order of sums and no more.
PARITY = 1e-5
#: What a wrong layer, token or prompt must be above, so that PARITY says something.
WRONG = 1e-2


@pytest.fixture(scope="module", params=["transformers", "sglang"])
def tiny_engine(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[CaptureEngine]:
    if request.param == "sglang":
        yield request.getfixturevalue("tiny_sglang")
        return
    with open_engine(request.param, options_for(tiny_llama)) as engine:
        yield engine


@pytest.fixture(scope="module", params=["transformers", "sglang"])
def smol_engine(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[CaptureEngine]:
    with open_engine(request.param, options_for(demo_model)) as engine:
        yield engine


def random_ids(engine: CaptureEngine, num_tokens: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(engine.options.model.vocab_size) for _ in range(num_tokens)]


class TestContract:
    """Run by both engines."""

    @pytest.mark.parametrize("num_tokens", [1, 2, 7, 333, MAX_TOKENS])
    def test_every_layer_of_a_tiny_llama_equals_hugging_face(self, tiny_engine: CaptureEngine, num_tokens: int):
        input_ids = random_ids(tiny_engine, num_tokens, seed=num_tokens)
        check_parity(tiny_engine, input_ids)

    def test_every_layer_of_smollm2_equals_hugging_face(self, smol_engine: CaptureEngine, demo_tokenizer):
        messages = [{"role": "user", "content": "What is the capital of France? Answer in French, German and Greek."}]
        check_parity(smol_engine, demo_tokenizer.apply_chat_template(messages, return_dict=False))

    def test_another_layer_token_or_prompt_is_far_from_parity(self, smol_engine: CaptureEngine, demo_tokenizer):
        ids = demo_tokenizer("The quick brown fox jumps over the lazy dog, and the dog does not mind at all.")[
            "input_ids"
        ]
        states = smol_engine.capture_alone(ids)
        truth = hugging_face_states(smol_engine.options.model.model, ids)
        other = smol_engine.capture_alone(random_ids(smol_engine, len(ids), seed=3))
        layers: list[Layer] = list(states)
        for shifted, layer in zip(layers, layers[1:], strict=False):
            # The first token's state is so large that it hides what the others' differ by.
            assert relative_error(states[shifted][1:], truth[layer][1:]) > WRONG, f"{shifted} passes for {layer}"
        for layer in layers:
            assert relative_error(states[layer][1:], truth[layer][:-1]) > WRONG, f"{layer} passes one token on"
            assert relative_error(other[layer], truth[layer]) > WRONG, f"another prompt's {layer} passes"

    def test_prompts_land_at_their_own_rows_and_nowhere_else(self, tiny_engine: CaptureEngine):
        prompts = [random_ids(tiny_engine, num_tokens, seed=num_tokens) for num_tokens in (5, 1, 64, 300)]
        alone = [tiny_engine.capture_alone(ids) for ids in prompts]
        buffer = tiny_engine.buffer(sum(map(len, prompts)) + 2)
        for hidden_SD in buffer.states.values():
            hidden_SD.fill_(torch.nan)
        starts = [0, 6, 7, 72]  # a gap of one row after the first prompt, and one after the third
        for start, ids in zip(starts, prompts, strict=True):
            tiny_engine.capture(ids, into=buffer, at=start)
        for layer, hidden_SD in buffer.states.items():
            for start, ids, states in zip(starts, prompts, alone, strict=True):
                assert torch.equal(hidden_SD[start : start + len(ids)], states[layer])
            assert hidden_SD[[5, 71]].isnan().all(), "rows of no prompt were written"
        buffer.release()

    def test_buffers_are_lent_and_given_back(self, tiny_engine: CaptureEngine):
        lent = [tiny_engine.buffer(10) for _ in range(tiny_engine.options.num_buffers)]
        with pytest.raises(queue.Empty):
            tiny_engine.buffer(10, timeout_s=0.05)
        for buffer in lent:
            buffer.release()
        tiny_engine.buffer(10, timeout_s=1).release()

    @pytest.mark.parametrize(
        ("input_ids", "at", "message"),
        [
            ([], 0, "a prompt of 0 tokens"),
            ([1] * (MAX_TOKENS + 1), 0, f"opened for 1..{MAX_TOKENS}"),
            ([1, 10**6], 0, "the vocabulary is"),
            ([-1], 0, "the vocabulary is"),
            ([1, 2, 3], 8, "do not fit at row 8"),
        ],
    )
    def test_what_cannot_be_captured_is_an_error(self, tiny_engine, input_ids, at, message):
        buffer = tiny_engine.buffer(10)
        try:
            with pytest.raises(ValueError, match=message):
                tiny_engine.capture(input_ids, into=buffer, at=at)
        finally:
            buffer.release()

    def test_a_shard_above_the_engines_memory_is_an_error(self, tiny_engine: CaptureEngine):
        with pytest.raises(ValueError, match="opened for"):
            tiny_engine.buffer(2 * MAX_TOKENS + 1)

    def test_python_does_the_same_work_for_a_token_as_for_a_thousand(self, tiny_engine: CaptureEngine):
        def calls(num_tokens: int) -> int:
            prompts = [random_ids(tiny_engine, num_tokens, seed=seed) for seed in range(2)]
            buffer = tiny_engine.buffer(2 * num_tokens)
            try:
                tiny_engine.capture_all(prompts, into=buffer)
                # The most of some: a finished task is freed, which is a call, in this thread or in the event loop's.
                run = functools.partial(tiny_engine.capture_all, prompts, into=buffer)
                return max(counted_calls(run, within="/hsray/") for _ in range(5))
            finally:
                buffer.release()

        assert calls(MAX_TOKENS) == calls(1)


def test_an_engine_in_an_application_leaves_its_logging_as_it_was(tiny_sglang, caplog):
    logging.getLogger("application").warning("still heard")
    assert "still heard" in caplog.text


def test_each_of_200_prompts_of_a_build_gets_the_states_it_has_alone(ray_session, tiny_llama, tiny_sglang, tmp_path):
    rows = unique_prompts(200, longest=700)
    out = tmp_path / "out"
    report = hsray.build(
        rows,
        model=str(tiny_llama),
        layers=["embed", 0, 3, 5, "final"],
        out=out,
        dtype="float32",
        shard_bytes=8 << 20,
        progress=False,
    )
    assert (report.prompts, report.new_shards) == (200, report.shards)
    assert report.shards > 20
    dataset = hsray.read(out)
    assert [dataset[i]["prompt_id"] for i in range(200)] == [row["id"] for row in rows]
    for index, row in enumerate(rows):
        prompt, alone = dataset[index], tiny_sglang.capture_alone(row["input_ids"])
        assert prompt["input_ids"].tolist() == row["input_ids"]
        for layer, hidden_TD in prompt["hidden_states"].items():
            assert torch.equal(hidden_TD, alone[layer]), f"{row['id']}, layer {layer}"


def test_prompts_that_share_a_pass_get_the_states_they_have_alone_and_one_that_hangs_is_given_up(
    tiny_llama: Path, tiny_sglang: CaptureEngine
):
    """Two concerns, since each engine takes most of a minute to start; and nothing that the LM head reads is captured."""
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    options = options_for(
        tiny_llama,
        layers=resolve_layers(["embed", 0, 2, 5], num_layers=6),
        requests_in_flight=16,
        prefill_tokens=512,
        buffer_tokens=40_000,
        request_timeout_s=10,
    )
    chosen = random.Random(5)
    with open_engine("sglang", options) as engine:
        prompts = [random_ids(engine, chosen.randint(1, 200), seed=seed) for seed in range(100)]
        prompts += [random_ids(engine, num_tokens, seed=num_tokens) for num_tokens in (1, 511, 512, 513, MAX_TOKENS)]
        buffer, before = engine.buffer(sum(map(len, prompts))), engine.passes
        engine.capture_all(prompts, into=buffer)
        passes, start = engine.passes - before, 0
        for ids in prompts:
            alone = tiny_sglang.capture_alone(ids)
            for layer, found_SD in buffer.states.items():
                worst = max(map(relative_error, found_SD[start : start + len(ids)], alone[layer]))
                assert worst <= PARITY, f"layer {layer} of the prompt of {len(ids)} tokens at row {start}"
            start += len(ids)
        buffer.release()
        assert len(prompts) / 16 <= passes < len(prompts) / 2, "requests in flight did not share passes"
        for process in schedulers(except_for=others):
            process.suspend()
        with pytest.raises(EngineDied, match=r"no answer to a prompt of 8 tokens, nor to any other, for 1[01] s"):
            engine.capture_alone(random_ids(engine, 8, seed=0))
        assert not schedulers(except_for=others)
        with pytest.raises(EngineDied, match="is closed"):
            engine.capture_alone(random_ids(engine, 8, seed=0))


@pytest.mark.parametrize("name", SAFE_ARGS)
def test_a_switch_that_corrupts_states_is_refused_before_anything_starts(tiny_llama: Path, name: str):
    wrong = {"speculative_algorithm": "EAGLE3", "moe_a2a_backend": "deepep", "dp_size": 2, "pp_size": 2}
    value = wrong.get(name, not SAFE_ARGS[name])
    with pytest.raises(ValueError, match=f"{name}.*would make hidden states wrong"):
        open_engine("sglang", options_for(tiny_llama, engine_args={name: value}))


@pytest.mark.parametrize("name", OWN_ARGS)
def test_what_the_dataset_records_cannot_be_changed_behind_its_back(tiny_llama: Path, name: str):
    with pytest.raises(ValueError, match=f"engine_args.*{name}.*say "):
        open_engine("sglang", options_for(tiny_llama, engine_args={name: "x"}))


def test_prefill_without_any_chunking_is_refused(tiny_llama: Path):
    with pytest.raises(ValueError, match="chunked_prefill_size"):
        open_engine("sglang", options_for(tiny_llama, engine_args={"chunked_prefill_size": -1}))


def test_two_ranks_that_share_a_model_give_its_states_in_chunks_too_and_once_dead_say_so(tiny_llama: Path):
    """Three concerns, since each engine takes most of a minute to start."""
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    options = options_for(tiny_llama, tensor_parallel=2, engine_args={"chunked_prefill_size": 64})
    with open_engine("sglang", options) as engine:
        for num_tokens in (1, 7, 63, 64, 65, 333):
            check_parity(engine, random_ids(engine, num_tokens, seed=num_tokens))
        for process in schedulers(except_for=others):
            process.kill()
        with pytest.raises(EngineKilled, match="scheduler process died during a prompt of 8 tokens"):
            engine.capture_alone(random_ids(engine, 8, seed=0))


def test_a_model_that_sglang_cannot_load_is_an_error_in_its_own_words(tiny_llama: Path, tmp_path: Path):
    for path in tiny_llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["NobodysForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineDied, match=r"(?s)NobodysForCausalLM.*engine='transformers' runs") as raised:
        open_engine("sglang", options_for(tmp_path))
    assert raised.type is EngineDied  # it was not killed, and need not be tried again


def test_an_unknown_engine_is_an_error(tiny_llama):
    with pytest.raises(ValueError, match="wanted 'sglang' or 'transformers'"):
        open_engine("vllm", options_for(tiny_llama))


def check_parity(engine: CaptureEngine, input_ids: list[int]) -> None:
    states = engine.capture_alone(input_ids)
    truth = hugging_face_states(engine.options.model.model, input_ids)
    assert list(states) == list(truth)
    for layer, hidden_TD in states.items():
        assert hidden_TD.shape == truth[layer].shape
        assert relative_error(hidden_TD, truth[layer]) <= PARITY, f"layer {layer}"
        worst = max(map(relative_error, hidden_TD, truth[layer]))
        assert worst <= PARITY, f"layer {layer}, its worst row"
