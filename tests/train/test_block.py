"""The recipe block: slots learn the laws they will be asked for, and arithmetic agrees with the
engine."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun import LLM, ConfigError, SamplingParams
from forerun.draft.block.module import BlockHead, save_block
from forerun.draft.block.proposer import BlockProposer as Proposer
from forerun.draft.proposer import DraftRequest
from forerun.draft.tree import Tree
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus, Example
from forerun.train.evaluate import Judge
from forerun.train.loop import Trainer
from forerun.train.options import BlockOptions
from forerun.train.recipes import Block
from forerun.train.recipes import block as recipe_module
from forerun.train.recipes.block import blocks, mask_token, spread
from forerun.train.settings import Training
from forerun.train.stream import Stream
from forerun.verify import Noise
from tests import tiny
from tests.cli.test_main import run
from tests.train.conftest import SMALL, documents

OPTIONS = BlockOptions(
    block_size=3, block_layers=1, markov_rank=8, kl=1.0, tv=0.0, decay=0.5, confidence=0.7
)
RECIPE = Block(OPTIONS)
TEXTS = [Example(tuple(range(3, 25)), 1), Example(tuple(range(40, 9, -2)), 7)]


@pytest.fixture
def aimed(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """The target, whose batches bring what this recipe wants."""
    monkeypatch.setattr(target, "aux_hidden_layers", (1, 2, 3))
    assert (
        target.head.requires_grad is False
    )  # read here: tensors that are made while drafting cannot be learnt from
    yield target


def head_of(
    target: Target, corpus: Corpus, options: BlockOptions = OPTIONS, **changes: int
) -> BlockHead:
    """A head whose parts all have a say."""
    torch.manual_seed(0)
    head = Block(options).build(target, corpus)
    assert isinstance(head, BlockHead)
    if changes:
        layer = replace(head.config.layer, windows=(changes.pop("window", None),))
        head = BlockHead(replace(head.config, layer=layer, **changes))
        head.attach(target.view)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return head


def proposed(
    head: BlockHead, target: Target, batch: Batch, row: int, root: int
) -> list[tuple[torch.Tensor, float]]:
    """What the proposer says behind a root, in float32: (logits, logit of confidence) of each slot,
    the text right."""
    drafter = Proposer(head, replace(target.view, form=None), tokens=64, page=4, slots=1)
    tokens = batch.tokens[row].tolist()
    drafter.open(0, tokens[: root + 1])
    drafter.observe(0, 0, {b: states[row, :root] for b, states in batch.states.items()})
    row_of = DraftRequest(0, tokens[: root + 1], SamplingParams(), Noise(1, root), 9)
    drafter.propose([row_of])
    with torch.no_grad():
        (grown,) = drafter._run_blocks([Tree(row_of)])
        found = []
        for k, (made, said) in enumerate(zip(grown.outputs, grown.logits, strict=True)):
            if root + k < len(tokens):
                previous = batch.tokens[row, root + k]
                trust = (
                    float(head.confidence_logit(made, previous)) if head.config.confidence else 0.0
                )
                found.append((head.over_target_vocab(head.add_markov_bias(said, previous)), trust))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_from_anchor": True}, {"sample_from_anchor": False}, {"window": 3},
        {"window": 3, "window_causal": True},
    ],
)  # fmt: skip
def test_blocks_are_what_the_proposer_drafts(
    aimed: Target, corpus: Corpus, changes: dict[str, int]
) -> None:
    """All blocks of a text at once, each from its own anchor; the first, the last, one after the
    other, or twice."""
    head, batch = head_of(aimed, corpus, **changes), aimed.batch(TEXTS)
    anchors = torch.tensor([[1, 21, 5, 6], [12, 3, 3, 2]])
    made = blocks(head, batch, anchors)
    assert made.shape == (2, 4, head.config.depth, 32)
    for row in range(2):
        for a, anchor in enumerate(anchors[row].tolist()):
            for k, (logits, _) in enumerate(proposed(head, aimed, batch, row, anchor)):
                mine = head.over_target_vocab(
                    head.add_markov_bias(
                        head.compute_logits(made[row, a, k]), batch.tokens[row, anchor + k]
                    )
                )
                assert torch.allclose(mine, logits, rtol=1e-3, atol=1e-3)


def test_the_loss_is_that_of_each_anchor_and_slot(aimed: Target, corpus: Corpus) -> None:
    """Slot k behind token i, the text before it right, against the target's law at i + k: by a loop
    over anchors."""
    head, batch = head_of(aimed, corpus), aimed.batch(TEXTS)
    total, weight = 0.0, 0.0
    for row, text in enumerate(TEXTS):
        for i in range(max(text.given - 1, 1), len(text.tokens) - 1):
            for k, (logits, trust) in enumerate(proposed(head, aimed, batch, row, i)):
                if i + k < len(text.tokens) - 1:
                    p, q = batch.law.logs[row, i + k].exp(), logits.softmax(-1)
                    loss = float((p * (p.log() - q.log())).sum())
                    stands, sure = (
                        float(torch.minimum(p, q).sum()),
                        torch.tensor(trust).sigmoid().item(),
                    )
                    loss -= (
                        0.7
                        * (
                            stands * torch.tensor(sure).log()
                            + (1 - stands) * torch.tensor(1 - sure).log()
                        ).item()
                    )
                    total, weight = total + 0.5**k * loss, weight + 0.5**k
    loss = RECIPE.loss(head, batch)
    assert loss.item() == pytest.approx(total / weight, rel=1e-3)
    loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_a_head_of_some_tokens_learns_the_laws_of_these(aimed: Target, corpus: Corpus) -> None:
    """Its rows begin as the target's; the loss is over what it can say, of the target's law made to
    sum to 1, while how sure it should be follows from the whole law."""
    head, batch = head_of(aimed, corpus, replace(OPTIONS, draft_vocab=100)), aimed.batch(TEXTS)
    fresh = Block(replace(OPTIONS, draft_vocab=100)).build(aimed, corpus)
    assert isinstance(fresh, BlockHead)
    ids = head.tokens()
    assert ids is not None and torch.equal(fresh.lm_head.weight, aimed.head[ids])
    total, weight = 0.0, 0.0
    for row, text in enumerate(TEXTS):
        for i in range(max(text.given - 1, 1), len(text.tokens) - 1):
            for k, (logits, trust) in enumerate(proposed(head, aimed, batch, row, i)):
                if i + k < len(text.tokens) - 1 and text.tokens[i + k + 1] in ids.tolist():
                    p, q = batch.law.logs[row, i + k].exp()[ids], logits.softmax(-1)[ids]
                    among = p / p.sum()
                    stands, sure = torch.minimum(p, q).sum(), torch.tensor(trust).sigmoid()
                    loss = (among * (among.log() - q.log())).sum()
                    loss -= 0.7 * (stands * sure.log() + (1 - stands) * (1 - sure).log())
                    total, weight = total + 0.5**k * float(loss), weight + 0.5**k
    assert weight and Block(replace(OPTIONS, draft_vocab=100)).loss(
        head, batch
    ).item() == pytest.approx(total / weight, rel=1e-3)


def test_a_head_begins_with_the_norm_of_the_target_and_no_bias(
    aimed: Target, corpus: Corpus
) -> None:
    """What its slots say is then of the size that the target's head is made for."""
    head = RECIPE.build(aimed, corpus)
    assert isinstance(head, BlockHead)
    made, previous = torch.randn(3, 32), torch.tensor([5, 6, 7])
    assert torch.equal(
        head.over_target_vocab(head.add_markov_bias(head.compute_logits(made), previous)),
        aimed.view.head(made),
    )
    assert torch.allclose(head.norm(made), aimed.view.normalise(made), rtol=1e-2, atol=1e-2)


def test_anchors_follow_from_the_texts(aimed: Target) -> None:
    """Positions that count and have something before them, none twice; the same texts have the same
    anchors."""
    recipe, batch = Block(replace(OPTIONS, anchors=12)), aimed.batch(TEXTS)
    anchors, chosen = recipe.anchors(batch)
    assert chosen.sum(1).tolist() == [12, 9]  # of the second text 9 positions count
    for row, text in enumerate(TEXTS):
        found = anchors[row][chosen[row]].tolist()
        assert len(set(found)) == len(found) and all(
            max(text.given - 1, 1) <= i < len(text.tokens) - 1 for i in found
        )
    torch.manual_seed(5)
    assert torch.equal(recipe.anchors(aimed.batch(TEXTS))[0], anchors)
    assert not torch.equal(recipe.anchors(aimed.batch([TEXTS[0], TEXTS[0]]))[0][0], anchors[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_outlook_is_that_of_each_drafted_token(
    aimed: Target, corpus: Corpus, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind every root, however many are computed together; where no token is drafted none can
    stand."""
    monkeypatch.setattr(recipe_module, "ANCHORS", 4)
    head, batch = head_of(aimed, corpus).eval(), aimed.batch(TEXTS, temperature)
    with torch.no_grad():
        outlook = RECIPE.analytic(head, batch, 5)
    assert outlook.chances.shape == outlook.overlap.shape == (2, 21, 5)
    assert not outlook.chances[..., 3:].any() and not outlook.chances[:, 0].any()
    for i, root in ((0, 1), (0, 4), (0, 5), (0, 20), (1, 6), (1, 12)):
        for k, (logits, _) in enumerate(proposed(head, aimed, batch, i, root)):
            if root + k >= len(TEXTS[i].tokens) - 1:
                assert outlook.chances[i, root, k] == 0
                continue
            q = logits.softmax(-1) if not temperature else (logits / temperature).softmax(-1)
            if not temperature:
                q = torch.nn.functional.one_hot(q.argmax(), len(q)).float()
            p, token = batch.law.logs[i, root + k].exp(), batch.tokens[i, root + k + 1]
            assert outlook.overlap[i, root, k].item() == pytest.approx(
                torch.minimum(p, q).sum().item(), abs=1e-4
            )
            expected = min(1.0, float(q[token] / p[token])) if p[token] else float(q[token] > 0)
            assert outlook.chances[i, root, k].item() == pytest.approx(expected, abs=1e-3)
            if k == 0 and temperature:
                assert outlook.said[i, root].item() == pytest.approx(
                    float(q[token].log()), abs=1e-3
                )


def test_training_pays_and_arithmetic_agrees_with_the_engine(
    aimed: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Accepted length rises; measured and analytic agree within 5 %; what is written changes no
    text."""
    held_out = Corpus(
        documents([f'{{"name":"beta {i}","sizes":[{i},{i * 3}]}} true false null' for i in range(30)]),
        aimed.tokenizer, SMALL["tokens"], SMALL["prompt_tokens"],
    )  # fmt: skip
    training = Training(
        **(SMALL | dict(steps=40, rows=6, evaluate_rows=30, evaluate_every=0, depth=2, temperature=1.0)),
        learning_rate=0.01, patience=0, on_policy=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    judge, head = Judge(aimed, RECIPE, held_out, training), RECIPE.build(aimed, corpus)
    trainer = Trainer(
        RECIPE,
        head,
        aimed,
        Stream(corpus, aimed, training),
        judge,
        training,
        tmp_path / "block.training",
        {},
    )
    before, after = trainer.run().evaluations
    assert after.accepted_length > before.accepted_length + 0.02
    directory = tmp_path / "drafter"
    RECIPE.export(head, aimed, directory)
    for entry in judge.measure(RECIPE.load(directory, aimed), directory, judge.cases):
        assert entry.passes > 200
        assert entry.accepted_length == pytest.approx(
            entry.analytic, rel=0.05 if entry.temperature else 0.02
        )
    llm = LLM(tiny.worded(), draft=f"block:{directory}", kv_tokens=512)
    params = SamplingParams.pure(max_tokens=20, temperature=0.7, seed=2, ignore_eos=True)
    texts = [
        llm.generate([5, 6, 7], params, draft=draft)[0].token_ids for draft in ("block", "off")
    ]
    assert texts[0] == texts[1]


def test_the_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    """From flags to a directory that says what it is, and is measured again as it was; a fill-in
    drafter is, too."""
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | {"depth": 2}).items()
    ]
    basics = ["train", "--target", str(tiny.worded()), "--data", str(data), *flags]
    out = tmp_path / "drafter"
    code, text, err = run(
        monkeypatch, capsys, *basics, "--recipe", "block", "--block-size", "3", "--block-layers", "1", "--decay=0.7",
        "--confidence", "0.5", "--out", str(out),
    )  # fmt: skip
    assert code == 0, err
    assert f"--eval {out}" in text
    report = json.loads((out / "training.json").read_text())
    assert (
        report["recipe"] | {"name": "block", "block_size": 3, "decay": 0.7, "confidence": 0.5}
        == report["recipe"]
    )
    code, text, err = run(monkeypatch, capsys, *basics, "--eval", str(out), "--json")
    assert code == 0, err
    assert [m["accepted_length"] for m in json.loads(text)["measured"]] == [
        m["accepted_length"] for m in report["measured"]
    ]
    config = tiny.block_config(
        "llama",
        sample_from_anchor=False,
        aux_hidden_layers=(1, 3),
        layer={"vocab_size": tiny.WORDED},
    )
    other = tiny.block(replace(config, draft_vocab=90, own_head=True))
    save_block(other, tmp_path / "other")
    code, text, err = run(
        monkeypatch, capsys, *basics, "--eval", f"block:{tmp_path / 'other'}", "--json"
    )
    assert code == 0, err
    assert [m["depth"] for m in json.loads(text)["measured"]] == [1, 2, 1, 2]


def test_the_states_are_evenly_spaced() -> None:
    assert spread(6, 3) == (1, 3, 6)
    assert (
        spread(36, 5) == (1, 10, 19, 27, 36) and spread(24, 1) == (24,) and spread(2, 5) == (1, 2)
    )
    assert all(len(spread(layers, layers)) == layers for layers in range(1, 40))


def test_the_mask_is_a_token_that_texts_do_not_use(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One the tokenizer lacks, else padding, else the rarest."""
    spelt = target.tokenizer.vocabulary()
    unused = mask_token(target, corpus, None)
    assert unused not in spelt.values() and unused < target.vocab
    assert mask_token(target, corpus, 7) == 7
    with pytest.raises(ConfigError, match="mask_token=328 is no token of the target"):
        mask_token(target, corpus, target.vocab)
    whole = {str(i): i for i in range(target.vocab)}
    monkeypatch.setattr(type(target.tokenizer), "vocabulary", lambda self: whole)
    assert mask_token(target, corpus, None) == 0, "pad_token_id of the tiny models"
    monkeypatch.setitem(target.llm.decoder.config.raw, "pad_token_id", None)
    rarest = mask_token(target, corpus, None)
    assert rarest not in {token for example in corpus.examples for token in example.tokens}


def test_options_that_cannot_be() -> None:
    for wrong in (
        {"block_size": 0}, {"block_size": 65}, {"block_layers": 0}, {"fused_states": 0}, {"anchors": 0},
        {"markov_rank": -1}, {"confidence": -1.0}, {"mask_token": -1}, {"decay": 0.0}, {"decay": 1.1},
        {"kl": 0.0, "tv": 0.0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            BlockOptions(**wrong)  # type: ignore[arg-type]


def test_batches_without_an_anchor_teach_nothing(aimed: Target, corpus: Corpus) -> None:
    """And break nothing."""
    head, batch = head_of(aimed, corpus), aimed.batch([Example((5, 6), 1)])
    loss = RECIPE.loss(head, batch)
    loss.backward()
    assert loss.item() == 0.0
