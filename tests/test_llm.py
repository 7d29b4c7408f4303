"""The library's interface: kinds of prompts, n, streams, stop strings, seeds, and refusals before
any work."""

import gc
import itertools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import (
    LLM,
    Config,
    ConfigError,
    LoadError,
    RequestError,
    SamplingParams,
    draft_spec,
    load,
)
from forerun.draft import registry
from forerun.draft.automaton import SuffixAutomaton
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.draft_loading import share_memory
from forerun.errors import StateError
from forerun.kernels import native
from forerun.llm import derive_seed
from forerun.load import pick_device
from forerun.models.config import note
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft
from tests import other_vocabularies, tiny


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Load a tiny model and a draft model that often agrees, in float64 for equal tokens."""
    draft = f"model:{tiny.repetitive(0.1)}"
    return LLM(tiny.repetitive(), draft=draft, dtype="float64", context=256, kv_tokens=4096)


PROMPT = "def add(a, b):\n"


def test_every_draft_gives_the_same_tokens(llm: LLM) -> None:
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(max_tokens=40, temperature=temperature, seed=4)
        (plain,) = llm.generate(PROMPT, params, draft="off")
        for draft in ("ngram", "suffix", "model", "auto"):
            for depth in (None, 0, 3):
                (other,) = llm.generate(PROMPT, params, draft=draft, depth=depth)
                assert (other.token_ids, other.text) == (plain.token_ids, plain.text)
        assert plain.stats.accepted_length == 1.0


@pytest.mark.parametrize("draft", ["model", "suffix+model"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_draft_model_with_another_vocabulary_is_lossless(
    kernels: str, draft: str, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note says that the vocabularies differ; drafts are accepted and change no token."""
    if kernels == "native" and native.library() is None:
        pytest.skip(native.reason())
    note.cache_clear()
    dtype = "float32" if kernels == "native" else "float64"
    draft = f"{draft}:{other_vocabularies.drafter('pieces')}"
    llm = LLM(tiny.repetitive(), draft=draft, dtype=dtype, kernels=kernels, kv_tokens=2048)
    assert "another vocabulary" in capsys.readouterr().err
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(max_tokens=40, temperature=temperature, seed=4)
        (plain,) = llm.generate(PROMPT, params, draft="off")
        (other,) = llm.generate(PROMPT, params, depth=4)
        assert (other.token_ids, other.text) == (plain.token_ids, plain.text)
        assert other.stats.by_source["model"].accepted > 0


def test_prompts_of_every_kind(llm: LLM) -> None:
    params = SamplingParams.pure(max_tokens=5)
    ids = llm.tokenizer.encode(PROMPT)
    messages = [{"role": "user", "content": "hello"}]
    assert llm.generate(PROMPT, params)[0].token_ids == llm.generate(ids, params)[0].token_ids
    many = llm.generate([PROMPT, ids, messages], params)
    assert [c.token_ids for c in many[:2]] == [llm.generate(PROMPT, params)[0].token_ids] * 2
    assert many[2].token_ids == llm.generate(messages, params)[0].token_ids
    assert many[2].prompt_token_ids == llm.tokenizer.encode("user: hello\nassistant:")


@pytest.mark.parametrize("prompt",
    [
        [], [[]], [1.5], [True], [["x"]], [{"role": "user"}], "", [[{"content": "x"}]], None, 5, 1.5, {1, 2}, [None],
        b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), [b"bytes"], (text for text in ["x"]), [[[1]]], [-1],
        {"role": "user", "content": "x"}, [{"role": "user", "content": "x"}, "text"], [10**30], "\ud800",
        [{"role": "user", "content": 5}], [{"role": 5, "content": "x"}], [{"role": "user", "content": {}}], [{5: 6}],
    ],
)  # fmt: skip
def test_invalid_prompts_are_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt)  # type: ignore[arg-type]
    assert not llm.engine.busy


def test_one_invalid_prompt_of_many_adds_no_request(llm: LLM) -> None:
    with pytest.raises(RequestError, match="context"):
        llm.generate([PROMPT, [5] * 300])
    llm.generate(PROMPT, SamplingParams.pure(max_tokens=1))
    assert not llm.engine.busy


def test_n_completions_have_derived_seeds(llm: LLM) -> None:
    params = SamplingParams.pure(max_tokens=12, temperature=1.0, seed=9, n=3)
    completions = llm.generate([PROMPT, "class A:\n"], params)
    assert len(completions) == 6
    assert [c.seed for c in completions[:3]] == [derive_seed(9, i) for i in range(3)]
    assert len({tuple(c.token_ids) for c in completions[:3]}) > 1
    (alone,) = llm.generate(PROMPT, replace(params, n=1, seed=completions[1].seed))
    assert alone.token_ids == completions[1].token_ids


def test_a_completion_without_a_seed_has_a_random_one(llm: LLM) -> None:
    params = SamplingParams.pure(max_tokens=12, temperature=1.0)
    first, second = (llm.generate(PROMPT, params)[0] for _ in range(2))
    assert first.seed != second.seed
    (again,) = llm.generate(PROMPT, replace(params, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_stream_gives_the_same_as_generate(llm: LLM) -> None:
    params = SamplingParams.pure(max_tokens=30, temperature=0.8, seed=2, logprobs=1)
    stream = llm.stream(PROMPT, params)
    events = list(stream)
    (full,) = llm.generate(PROMPT, params, draft="off")
    assert "".join(e.text for e in events) == full.text == stream.completion.text
    assert stream.completion.token_ids == full.token_ids
    assert [e.token_id for e in stream.completion.logprobs] == full.token_ids


def test_a_stream_that_is_left_early_frees_its_slot(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams.pure(max_tokens=50, ignore_eos=True))
    for _ in stream:
        break
    assert not llm.engine.busy and not llm._runs
    so_far = stream.completion
    assert so_far.finish_reason == "abort" and so_far.token_ids and so_far.stats.seconds > 0
    llm.generate(PROMPT, SamplingParams.pure(max_tokens=1))
    assert stream.completion.token_ids == so_far.token_ids and not llm.engine.busy


@pytest.mark.one_in(5)
@pytest.mark.parametrize("draft", ["off", "suffix", "model", "suffix+model", "suffix&model"])
@pytest.mark.parametrize("exit_by", ["break", "error", "ctrl-c", "next", "generate"])
def test_a_stream_can_be_continued(exit_by: str, draft: str, llm: LLM) -> None:
    """However a loop over it ends, every event comes once and the tokens stay the same."""
    options = {"max_tokens": 30, "temperature": 0.8, "seed": 5}
    params = SamplingParams.pure(**options, ignore_eos=True, logprobs=1)
    full = llm.generate(PROMPT, params, draft="off")[0]
    stream, pieces, loops = llm.stream(PROMPT, params, draft=draft, depth=1), [], 0
    exception = {"error": ZeroDivisionError, "ctrl-c": KeyboardInterrupt}.get(exit_by)
    while "".join(pieces) != full.text or stream.completion.finish_reason == "abort":
        loops += 1
        if exit_by == "next":
            pieces.append(next(iter(stream)).text)
        else:
            with pytest.raises(exception) if exception else nullcontext():
                for event in stream:
                    pieces.append(event.text)
                    if exception:
                        raise exception
                    if exit_by == "generate":
                        llm.generate("class A:", SamplingParams.pure(max_tokens=3))
                    else:
                        break
        assert not llm.engine.busy and loops <= 30
    done = stream.completion
    assert (loops >= 15) == (exit_by != "generate"), "at most two tokens a step"
    assert (done.text, done.token_ids) == (full.text, full.token_ids)
    assert done.finish_reason == "length"
    assert [entry.token_id for entry in done.logprobs] == full.token_ids


def test_iterating_over_a_finished_stream_is_an_error(llm: LLM) -> None:
    """A second loop would otherwise silently give nothing."""
    stream = llm.stream(PROMPT, SamplingParams.pure(max_tokens=3, ignore_eos=True))
    assert len(list(stream)) and stream.completion.finish_reason == "length"
    for _ in range(2):
        with pytest.raises(RequestError, match=r"call llm\.stream"):
            next(iter(stream))
    at_its_end = llm.stream(PROMPT, SamplingParams.pure(max_tokens=3, ignore_eos=True))
    for event in at_its_end:
        if event.finish_reason:
            break
    assert list(at_its_end) == [], "the loop ended before it saw the end"
    with pytest.raises(RequestError, match="has ended"):
        list(at_its_end)


def test_a_stopped_stream_ends_and_cannot_be_continued(llm: LLM) -> None:
    params = SamplingParams.pure(max_tokens=50, ignore_eos=True)
    unread = llm.stream(PROMPT, params)
    running = llm.stream(PROMPT, params)
    unread.stop()
    assert list(unread) == []
    for _ in running:
        running.stop()
    completion = running.completion
    assert 0 < len(completion.token_ids) < 50 and completion.finish_reason == "abort"
    for stream in (unread, running):
        with pytest.raises(RequestError, match="has ended"):
            list(stream)


def test_streams_that_are_not_read_take_no_slot(llm: LLM) -> None:
    """There are more streams than slots, unread or partly read."""
    params = SamplingParams.pure(max_tokens=20, seed=1, temperature=0.8)
    (plain,) = llm.generate(PROMPT, params, draft="off")
    streams = [llm.stream(PROMPT, params) for _ in range(len(llm.engine.scheduler.slots) + 2)]
    started = [iter(stream) for stream in streams[:3]]
    for events in started:
        next(events)
    assert len(llm.engine.requests) == 3
    del events, started
    gc.collect()
    assert not llm.engine.requests and not llm._runs
    assert llm.generate(PROMPT, params)[0].token_ids == plain.token_ids
    assert {list(stream)[-1].finish_reason for stream in streams} == {plain.finish_reason}


def test_two_loops_over_one_stream_share_its_events(llm: LLM) -> None:
    params = SamplingParams.pure(max_tokens=12, seed=3, temperature=0.8, ignore_eos=True)
    (full,) = llm.generate(PROMPT, params)
    stream, pieces = llm.stream(PROMPT, params, depth=0), []
    for event in stream:
        pieces.append(event.text)
        for inner in stream:
            pieces.append(inner.text)
            break
    assert "".join(pieces) == full.text and len(pieces) == 12


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_step_leaves_a_valid_engine(
    error: type[BaseException], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a commit is interrupted, requests of that step end with an error and others continue."""
    params = SamplingParams.pure(max_tokens=20, seed=1, temperature=0.8, ignore_eos=True)
    (plain,) = llm.generate(PROMPT, params, draft="off")
    paused, open_, unread = (llm.stream(PROMPT, params) for _ in range(3))
    for _ in paused:
        break
    running = iter(open_)
    next(running)
    commit = llm.engine.target.cache.commit

    def commit_and_raise(slot: int, path: Any) -> None:
        commit(slot, path)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target.cache, "commit", commit_and_raise)
        with pytest.raises(error):
            llm.generate(PROMPT, params)
    with pytest.raises(StateError, match=f"cut short by {error.__name__}"):
        list(running)
    with pytest.raises(StateError, match="cut short"):
        list(open_)
    assert not llm.engine.busy and not llm._runs
    list(paused)
    list(unread)
    assert [s.completion.token_ids for s in (paused, unread)] == [plain.token_ids] * 2
    assert llm.generate(PROMPT, params)[0].token_ids == plain.token_ids


PARAMS = SamplingParams()
WRONG_PARAMS = [{"temperature": 0}, {}, [PARAMS], (PARAMS,), [], "x", 5, False, SamplingParams]


@pytest.mark.parametrize("params", WRONG_PARAMS, ids=repr)
def test_invalid_sampling_params_are_refused_in_one_line(llm: LLM, params: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="no SamplingParams: ") as found:
            call(PROMPT, params)
        assert "\n" not in str(found.value) and len(str(found.value)) < 250
    assert not llm.engine.busy


@pytest.mark.parametrize(
    "options",
    [
        {"draft": 5}, {"draft": ["suffix"]}, {"draft": True}, {"draft": Proposer()}, {"draft": b"off"},
        {"prediction": 5}, {"prediction": b"x"}, {"prediction": ["x"]}, {"documents": "one text"}, {"documents": 5},
        {"documents": [5]}, {"documents": None}, {"documents": [b"x"]},
    ],
    ids=lambda options: "=".join([next(iter(options)), type(next(iter(options.values()))).__name__]),
)  # fmt: skip
def test_options_of_a_wrong_type_are_refused_in_one_line(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(options))}=") as found:
        llm.generate(PROMPT, SamplingParams.pure(max_tokens=2), **options)
    assert "\n" not in str(found.value) and not llm.engine.busy


def test_a_message_without_content_is_empty(llm: LLM) -> None:
    """Messages of assistants that call tools have no content; the prompt must not say None."""
    tokens = llm.tokens([{"role": "user", "content": "x"}, {"role": "assistant", "content": None}])
    assert "None" not in llm.tokenizer.decode(tokens)


def test_two_streams_at_once(llm: LLM) -> None:
    params = [
        SamplingParams.pure(max_tokens=15, temperature=0.9, seed=s, ignore_eos=True) for s in (1, 2)
    ]
    alone = [llm.generate(PROMPT, p)[0].token_ids for p in params]
    streams = [llm.stream(PROMPT, p) for p in params]
    for _ in itertools.zip_longest(*streams):
        pass
    assert [s.completion.token_ids for s in streams] == alone


def test_stop_strings_cut_the_text_within_tokens(llm: LLM) -> None:
    (full,) = llm.generate(PROMPT, SamplingParams.pure(max_tokens=60))
    for start, size in ((3, 1), (7, 4), (11, 9)):
        stop = full.text[start : start + size]
        for draft in ("off", "auto"):
            params = SamplingParams.pure(max_tokens=60, stop=[stop, "never this"])
            (cut,) = llm.generate(PROMPT, params, draft=draft)
            assert cut.text == full.text[: full.text.index(stop)]
            assert cut.finish_reason == "stop"
            assert cut.token_ids == full.token_ids[: len(cut.token_ids)]


def test_end_of_text_stops_and_is_not_shown(llm: LLM) -> None:
    (end,) = llm.decoder.config.end_ids
    biased = SamplingParams.pure(max_tokens=20, logit_bias={end: 100.0}, min_tokens=6)
    (completion,) = llm.generate(PROMPT, biased)
    assert completion.finish_reason == "stop" and completion.token_ids[6:] == [end]
    assert "</s>" not in completion.text
    (on,) = llm.generate(
        PROMPT, SamplingParams.pure(max_tokens=8, logit_bias={end: 100.0}, ignore_eos=True)
    )
    assert on.token_ids == [end] * 8 and on.finish_reason == "length"


def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    llm = LLM(tiny.family("llama"), draft=f"model:{tiny.drafter('llama')}", width=2, kv_tokens=512)
    (completion,) = llm.generate([5, 6, 7], SamplingParams.pure(max_tokens=5, ignore_eos=True))
    assert len(completion.token_ids) == 5 and completion.text == ""
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate("text")


def test_a_draft_model_with_another_vocabulary_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="they must be the same"):
        LLM(tiny.family("llama"), draft=f"model:{tiny.with_tokenizer()}", kv_tokens=512)


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'depth'"):
        LLM(dept=3)


def test_unknown_devices_are_refused() -> None:
    assert pick_device("cpu").type == "cpu"
    for bad in ("gpu", "mps", "cuda:99"):
        with pytest.raises(ConfigError, match="device"):
            pick_device(bad)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("draft", "draft_device"),
    [("model:{}", "auto"), ("model:{}", "cpu"), ("ahead(model:{})", "cpu")],
)
def test_a_draft_beside_a_target_on_cuda(draft: str, draft_device: str) -> None:
    options = {"device": "cuda", "dtype": "float64", "kv_tokens": 4096}
    draft = draft.format(tiny.repetitive(0.1))
    llm = LLM(tiny.repetitive(), draft=draft, draft_device=draft_device, **options)
    params = SamplingParams.pure(max_tokens=60, temperature=0.8, seed=1)
    (plain,) = llm.generate(PROMPT, params, draft="off")
    (fast,) = llm.generate(PROMPT, params, depth=4)
    assert plain.token_ids == fast.token_ids and fast.stats.accepted > 0


def test_draft_device_places_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, made = [], load.make_runner

    def make(
        config: Config, directory: Path, device: torch.device, target: Runner | None = None
    ) -> Runner:
        devices.append(device)
        return made(config, directory, torch.device("cpu"), target)

    for module in ("forerun.llm", "forerun.draft_loading"):
        monkeypatch.setattr(f"{module}.make_runner", make)
    LLM(tiny.repetitive(), draft=f"model:{tiny.repetitive(0.1)}", draft_device="cpu:0")
    LLM(tiny.repetitive(), draft=f"model:{tiny.repetitive(0.1)}", device="cpu:0")
    assert devices == [torch.device(name) for name in ("cpu", "cpu:0", "cpu:0", "cpu:0")]
    with pytest.raises(ConfigError, match="there is no device 'gpu'"):
        LLM(tiny.repetitive(), draft_device="gpu")


def test_quantization_none_is_the_default() -> None:
    """The word is useful in lists of several to compare, and does not contradict a dtype."""
    assert Config(quantization="none", dtype="bfloat16") == Config(dtype="bfloat16")
    with pytest.raises(ConfigError, match="contradict"):
        Config(quantization="int8", dtype="bfloat16")


def test_caches_on_two_devices_fit_the_memory_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller memory determines the size on both devices."""
    target, room = LLM(tiny.repetitive(), max_rows=64).engine.target, []
    monkeypatch.setattr(target, "make_room", room.append)
    data = torch.empty(0, device="meta")
    cache = SimpleNamespace(row_bytes=target.cache.row_bytes, data=data, recurrent=None)
    proposer: Any = SimpleNamespace(kv=lambda: cache, make_room=room.append)
    for own, other in ((4_000_000, 2_000_000), (2_000_000, 4_000_000)):
        free = {"cpu": own, "meta": other}
        monkeypatch.setattr(load, "free_memory", lambda device, free=free: free[device.type])
        share_memory(Config(max_rows=64), target, [proposer])
    assert room == [500_000 // target.cache.row_bytes] * 4


def test_caches_on_a_gpu_grow_into_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take all memory, including their present size, but 15 %, a gigabyte and the copies of
    recurrent states; old caches are freed before new ones are allocated."""
    gpu, rooms = torch.device("cuda"), []
    pages = SimpleNamespace(count=100, size=16)
    data = SimpleNamespace(device=gpu, nbytes=4 << 30)
    caches = [
        SimpleNamespace(row_bytes=size, data=data, pages=pages, recurrent=own)
        for size, own in ((6000, SimpleNamespace(copy_bytes=1 << 29)), (2000, None))
    ]
    decoder = SimpleNamespace(context=1 << 30)
    target: Any = SimpleNamespace(cache=caches[0], make_room=rooms.append, decoder=decoder)
    proposer: Any = SimpleNamespace(kv=lambda: caches[1], make_room=rooms.append)
    monkeypatch.setattr(load, "free_memory", lambda device: 12 << 30)
    share_memory(Config(max_rows=64), target, [proposer])
    tokens = (int(0.85 * ((20 << 30) - (1 << 29))) - (1 << 30)) // 8000
    assert rooms == [16, 16, tokens, tokens]


def test_predictions_and_documents_are_lossless() -> None:
    llm = LLM(tiny.repetitive(), draft="off", kv_tokens=2048)
    params = SamplingParams.pure(temperature=0.8, seed=3, max_tokens=120)
    plain = llm.generate("def main():", params)[0]
    edited = plain.text[:60] + plain.text[80:] + "# the end\n"
    predicted = llm.generate("def main():", params, draft="suffix", depth=6, prediction=edited)[0]
    assert predicted.token_ids == plain.token_ids
    assert predicted.stats.by_source["prediction"].accepted > 60
    quoted = llm.generate("def main():", params, draft="ngram", documents=[edited], depth=4)[0]
    assert quoted.token_ids == plain.token_ids and quoted.stats.by_source["document"].accepted > 20


def test_references_end_at_a_token_outside_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers may have more tokens than their models, such as an image placeholder."""
    llm = LLM(tiny.repetitive(), draft="suffix", context=2048, kv_tokens=2048)
    assert llm.tokenizer is not None
    encode, vocab = llm.tokenizer.encode, llm.decoder.config.vocab
    monkeypatch.setattr(
        llm.tokenizer, "encode", lambda text, special=True: [*encode(text, special), vocab, 5]
    )
    (reference,) = llm.references("x = 1", [])
    assert list(reference.tokens) == encode("x = 1", special=False)


def test_references_that_are_too_long_are_refused() -> None:
    llm = LLM(tiny.repetitive(), draft="suffix", context=2048, kv_tokens=2048)
    for options in ({"prediction": "a = 1\n" * 5000}, {"documents": ["b" * 100_000]}):
        with pytest.raises(RequestError, match=f"at most {4 * llm.decoder.context}"):
            llm.generate("def f(", SamplingParams.pure(max_tokens=2), **options)


def test_documents_are_indexed_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are freed with the last request, even without garbage collection of cycles."""
    llm = LLM(tiny.repetitive(), draft="suffix", context=2048, kv_tokens=2048)
    made: list[weakref.ref[SuffixAutomaton]] = []

    class Counted(SuffixAutomaton):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

    monkeypatch.setattr("forerun.draft.proposer.SuffixAutomaton", Counted)
    prompts, params = ["def f(", "x =", "for i"], SamplingParams.pure(n=2, max_tokens=4)
    texts = {"documents": ["a = 1\n" * 20, "b"], "prediction": "c = 2"}
    gc.disable()
    try:
        assert len(llm.generate(prompts, params, **texts)) == 6
        assert len(made) == 3 and not any(automaton() for automaton in made)
    finally:
        gc.enable()


def test_target_and_drafters_share_the_cache_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a quarter of the free memory, and all hold the same number of tokens."""
    monkeypatch.setattr(load, "free_memory", lambda device: 4_000_000)
    drafts = [f"model:{tiny.repetitive(0.3)}", f"ahead(model:{tiny.repetitive(0.02)})"]
    alone, llm = (LLM(tiny.repetitive(), draft=draft, max_rows=64) for draft in ("suffix", drafts))
    found = [llm.engine.target.cache, *(p.kv() for p in llm.engine.proposers.values())]
    caches = {id(cache): cache for cache in found if cache}.values()
    assert len(caches) == 3
    (pages,) = {cache.pages.count for cache in caches}
    page_bytes = sum(cache.pages.size * cache.row_bytes for cache in caches)
    assert 900_000 < (pages - 1) * page_bytes <= 1_000_000
    assert pages < alone.engine.target.cache.pages.count
    params = SamplingParams.pure(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
    (plain,) = alone.generate("the name", params, draft="off")
    assert llm.generate("the name", params)[0].token_ids == plain.token_ids


class Repeating(Proposer):
    """Drafts the tokens after the previous occurrence of the last token."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            *before, last = request.tokens
            found = [i for i, token in enumerate(before) if token == last]
            copied = list(request.tokens[found[-1] + 1 :][: request.depth]) if found else []
            drafts.append(Draft.chain(last, copied, self.name))
        return drafts


@pytest.fixture
def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def test_a_custom_drafter_is_lossless(greedy: SamplingParams) -> None:
    """It drafts alone, after another drafter and with references."""
    prompt = "import os\nimport sys\n" * 3
    with LLM(tiny.repetitive(), draft=Repeating(), depth=4, kv_tokens=2048) as llm:
        assert llm.draft == "custom" and "draft='custom'" in repr(llm)
        llm.add_drafter("mine", Repeating())
        plain = llm.generate(prompt, greedy, draft="off")[0]
        for draft, options in (
            (None, {}),
            ("ngram|mine", {}),
            ("mine", {"documents": ["import os\nimport sys"]}),
        ):
            found = llm.generate(prompt, greedy, draft=draft, **options)[0]
            assert found.token_ids == plain.token_ids
            assert found.stats.drafted > 0


@pytest.mark.parametrize("name", ["suffix", "mine", "a b", "", "off|x", 3])
def test_a_custom_drafter_needs_a_new_name(name: Any) -> None:
    llm = LLM(tiny.repetitive(), draft="off", kv_tokens=1024)
    llm.add_drafter("mine", Repeating())
    with pytest.raises(ConfigError, match=r"called|already"):
        llm.add_drafter(name, Repeating())
    with pytest.raises(ConfigError, match="Proposer"):
        llm.add_drafter("other", Repeating)  # type: ignore[arg-type]


def test_a_drafter_of_an_installed_package(
    greedy: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "forerun.drafters"
    found = {
        "theirs": EntryPoint("theirs", "tests.test_llm:Repeating", group),
        "gone": EntryPoint("gone", "tests.nowhere:Repeating", group),
        "other": EntryPoint("other", "tests.test_llm:pytest.approx", group),
    }
    monkeypatch.setattr(draft_spec, "plugins", lambda: found)
    monkeypatch.setattr(registry, "plugins", lambda: found)
    llm = LLM(tiny.repetitive(), draft="ngram|theirs", kv_tokens=2048)
    assert llm.generate("import os\n" * 4, greedy)[0].stats.drafted > 0
    for name in ("gone", "other:3"):
        with pytest.raises(LoadError, match="installed package"):
            LLM(tiny.repetitive(), draft=name, kv_tokens=1024)
    with pytest.raises(ConfigError, match="did you mean 'theirs'"):
        LLM(tiny.repetitive(), draft="their", kv_tokens=1024)
    with pytest.raises(ConfigError, match=r"start it with LLM\(draft='gone'\)"):
        llm.generate("import os", greedy, draft="gone")


def test_chat_is_generate_with_messages(greedy: SamplingParams) -> None:
    llm = LLM(tiny.repetitive(), draft="off", kv_tokens=2048)
    messages = [{"role": "user", "content": "Hello"}]
    (expected,) = llm.generate(messages, greedy)
    assert [found.text for found in llm.chat([messages] * 2, greedy)] == [expected.text] * 2
    for wrong in ("Hello", [], [1], None):
        with pytest.raises(RequestError, match="messages are a list"):
            llm.chat(wrong)  # type: ignore[arg-type]


def test_a_closed_model_is_an_error() -> None:
    with LLM(tiny.repetitive(), draft="off", kv_tokens=1024) as llm:
        stream = llm.stream("Hello", SamplingParams(max_tokens=4))
    llm.close()
    assert "closed" in repr(llm)
    with pytest.raises(StateError, match="closed"):
        llm.generate("Hello")
    with pytest.raises(StateError, match="closed"):
        list(stream)
