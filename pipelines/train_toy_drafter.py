"""Trains a small EAGLE-3 style drafter on a dataset: the proof that its states mean what they say.

    python pipelines/train_toy_drafter.py --out .demo/dataset

The drafter is one transformer block. At token t it reads three layers' states of t and the token after it, and drafts the
target's ``"final"`` of that token, from which the target's own LM head chooses. One is trained on the states as they are, one
on those of the layer that the dataset holds before each, one on rows in another order; all straight from the dataset's
stream, and from the same weights. Each is then given right states of prompts that none has seen, as an engine would give
them. Beside them stands a table of what the target chooses most after each token.

Shapes: B tokens of a batch, T drafted tokens of it, D hidden size, V draft vocabulary.
"""

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm
from transformers import AutoModelForCausalLM

import hsray
from hsray.layers import Layer
from hsray.manifest import ManifestError, load_manifest
from hsray.reader import HiddenStates
from hsray.store import Store

#: Each so-many-th prompt is held out.
HELD_OUT = 5

#: Of all held-out tokens, what the right drafter must be ahead by: twice the error of a share of 2,000.
MARGIN = 0.02

LEARNING_RATE = 1e-3
NUM_HEADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Tokens of a batch that have a next one in it: what is known at token t beside what is drafted of token t + 1."""

    states: Mapping[Layer, torch.Tensor]
    """layer -> [T, D], of token t."""
    next_ids: torch.Tensor
    """int64 [T], token t + 1."""
    final: torch.Tensor
    """[T, D], the target's ``"final"`` of token t + 1."""
    visible: torch.Tensor
    """bool [T, T]: which of them each may look at, itself and those before it in its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target's embedding and LM head, frozen; both float32 [vocabulary, D]."""

    embedding: torch.Tensor
    head: torch.Tensor

    @classmethod
    def of(cls, model: str) -> "Target":
        """Reads them from the model."""
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        embedding, head = loaded.get_input_embeddings(), loaded.get_output_embeddings()
        return cls(embedding=embedding.weight.detach(), head=head.weight.detach())


class Drafter(nn.Module):
    """One causal transformer block over some layers' states and the next token's embedding."""

    def __init__(self, hidden_size: int, num_layers: int, width: int):
        super().__init__()
        self.enter = nn.Linear((num_layers + 1) * hidden_size, width)
        self.block = nn.TransformerEncoderLayer(
            width, NUM_HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.leave = nn.Linear(width, hidden_size)

    def forward(self, states: Sequence[torch.Tensor], embedded_TD: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Drafts the target's final states, [T, D]."""
        # Each alone, since one layer's states may be a hundred times another's.
        known = torch.cat([rms_norm(hidden_TD, hidden_TD.shape[1:]) for hidden_TD in (*states, embedded_TD)], dim=1)
        return self.leave(self.block(self.enter(known)[None], src_mask=~visible)[0])


class Experiment:
    """A dataset's prompts, those to train on and those held out, and what the target chooses in both."""

    def __init__(self, dataset: HiddenStates, target: Target, *, batch_tokens: int, width: int, epochs: int, seed: int):
        self._dataset, self._target, self._batch_tokens = dataset, target, batch_tokens
        self._width, self._epochs, self._seed = width, epochs, seed
        self.held_out = [(pairs, self._choices(pairs)) for pairs in self._pairs(held_out=True)]
        self.chosen: dict[int, Counter[int]] = defaultdict(Counter)
        """Token -> what the target chose after it, in the prompts to train on."""
        for pairs in self._pairs():
            for token, choice in zip(pairs.next_ids.tolist(), self._choices(pairs).tolist(), strict=True):
                self.chosen[token][choice] += 1
        # As EAGLE-3 does, it drafts only what the target has been seen to choose.
        self.draft_ids = torch.tensor(sorted({choice for choices in self.chosen.values() for choice in choices}))
        self._head_VD = target.head[self.draft_ids]

    def _pairs(self, *, held_out: bool = False, shuffle: bool = False) -> Iterator[Pairs]:
        """One pass over the stream."""
        for batch in self._dataset.stream(batch_tokens=self._batch_tokens, shuffle=shuffle, seed=self._seed):
            documents_B = batch["document_ids"][0]
            wanted_B = (documents_B % HELD_OUT == 0) == held_out
            here = (documents_B[:-1] == documents_B[1:]) & wanted_B[:-1]
            documents_T = documents_B[:-1][here]
            if len(documents_T):
                states = {layer: hidden_1BD[0].float() for layer, hidden_1BD in batch["hidden_states"].items()}
                yield Pairs(
                    states={layer: hidden_BD[:-1][here] for layer, hidden_BD in states.items()},
                    next_ids=batch["input_ids"][0, 1:][here],
                    final=states["final"][1:][here],
                    visible=(documents_T[:, None] == documents_T).tril(),
                )

    def _choices(self, pairs: Pairs) -> torch.Tensor:
        return (pairs.final @ self._target.head.T).argmax(dim=1)

    def train(self, layers: Sequence[Layer], *, shuffled: bool) -> tuple[Drafter, list[float]]:
        """A drafter trained on these layers, or on their rows in another order; each epoch's mean loss of a token."""
        torch.manual_seed(self._seed)
        drafter = Drafter(self._head_VD.shape[1], len(layers), self._width)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=LEARNING_RATE)
        losses = []
        for _ in range(self._epochs):
            total = num_tokens = 0
            for pairs in self._pairs(shuffle=True):
                wanted_TV = (pairs.final @ self._head_VD.T).softmax(dim=1)
                loss = cross_entropy(self._logits(drafter, pairs, layers, shuffled=shuffled), wanted_TV)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
                optimizer.step()
                total += loss.item() * len(wanted_TV)
                num_tokens += len(wanted_TV)
            losses.append(total / num_tokens)
        return drafter.eval(), losses

    def _logits(
        self, drafter: Drafter, pairs: Pairs, layers: Sequence[Layer], *, shuffled: bool = False
    ) -> torch.Tensor:
        num_tokens = len(pairs.next_ids)
        order_T = torch.randperm(num_tokens) if shuffled else torch.arange(num_tokens)
        states = [pairs.states[layer][order_T] for layer in layers]
        return drafter(states, self._target.embedding[pairs.next_ids], pairs.visible) @ self._head_VD.T

    @torch.inference_mode()
    def drafted(self, drafter: Drafter, layers: Sequence[Layer]) -> float:
        """How often the drafter, given these layers of the held-out prompts, chooses as the target does."""
        return self._agreement(lambda pairs: self.draft_ids[self._logits(drafter, pairs, layers).argmax(dim=1)])

    def looked_up(self) -> float:
        """How often the target's usual choice after a token is its choice; after a new one, its usual choice of all."""
        usual = sum(self.chosen.values(), Counter()).most_common(1)[0][0]
        table = {token: choices.most_common(1)[0][0] for token, choices in self.chosen.items()}
        return self._agreement(lambda pairs: torch.tensor([table.get(id_, usual) for id_ in pairs.next_ids.tolist()]))

    def _agreement(self, choose: Callable[[Pairs], torch.Tensor]) -> float:
        right = sum(int((choose(pairs) == choices_T).sum()) for pairs, choices_T in self.held_out)
        return right / sum(len(choices_T) for _, choices_T in self.held_out)


def make_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        description="Train a small EAGLE-3 style drafter on a dataset, and others on the same dataset damaged: the proof that "
        "its states mean what they say. The exit status is 1 if the drafter's loss does not fall, or if it does not agree with "
        f"the target on {MARGIN:.0%} more of the held-out tokens than a bigram table and the others do.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, metavar="URL", help="the dataset's folder, as of pipelines/demo.py")
    add(
        "--layers",
        nargs="+",
        type=int,
        metavar="LAYER",
        help="those that the drafter reads, of which each must have one before it in the dataset; by default the last three",
    )
    add("--model", help="where the model lies now; by default where it lay when the dataset was built")
    add("--epochs", type=int, default=10, help="times that each prompt is seen")
    add("--batch-tokens", type=int, default=512, help="tokens of a step")
    add("--width", type=int, default=256, help="of the drafter's block")
    add("--seed", type=int, default=0, help="of the drafter's weights and the prompts' order")
    return parser


def choose_layers(held: Sequence[Layer], wanted: Sequence[int] | None) -> tuple[list[Layer], list[Layer]]:
    """The layers that a drafter reads, and for each the one that the dataset holds before it.

    Raises:
        ValueError: the dataset has not what is needed.
    """
    before = {layer: held[place - 1] for place, layer in enumerate(held) if place and layer != "final"}
    layers = list(before)[-3:] if wanted is None else list(wanted)
    if not layers or not {*layers} <= {*before} or "final" not in held:
        raise ValueError(
            f"the dataset has layers {list(held)}; a drafter of {wanted or 'any'} needs 'final', its layers, and one before "
            "each of them to confuse it with: choose with --layers, or build such a dataset with pipelines/demo.py"
        )
    return layers, [before[layer] for layer in layers]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, compares, prints; the exit status is 0 if the states are worth what they must be."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    try:
        manifest = load_manifest(Store(arguments.out))
        if manifest is None:
            raise ManifestError(f"{arguments.out!r} holds no dataset; build one with pipelines/demo.py")
        layers, shifted = choose_layers(manifest.identity.layers, arguments.layers)
        target = Target.of(arguments.model or manifest.identity.model)
        dataset = hsray.read(arguments.out, layers=[*dict.fromkeys([*layers, *shifted]), "final"])
    except (ValueError, OSError) as error:
        parser.error(str(error))
    experiment = Experiment(
        dataset,
        target,
        batch_tokens=arguments.batch_tokens,
        width=arguments.width,
        epochs=arguments.epochs,
        seed=arguments.seed,
    )
    ways = {
        f"layers {layers} as they are": (layers, False),
        f"shifted: layers {shifted} for them": (shifted, False),
        "shuffled: their rows in another order": (layers, True),
    }
    table = Table(
        "trained on", "loss, first epoch", "last", "agreement", title="Held-out prompts, top-1 with the target"
    )
    agreements, fell = [], []
    for name, (read, shuffled) in ways.items():
        drafter, losses = experiment.train(read, shuffled=shuffled)
        agreements.append(experiment.drafted(drafter, layers))
        fell.append(losses[-1] < losses[0])
        table.add_row(name, f"{losses[0]:.2f}", f"{losses[-1]:.2f}", f"{agreements[-1]:.1%}")
    agreements.append(experiment.looked_up())
    table.add_row("bigrams: the target's usual choice after a token", "", "", f"{agreements[-1]:.1%}")
    console = Console()
    console.print(table)
    right, *others = agreements
    ahead = fell[0] and right >= max(others) + MARGIN
    held_out = sum(len(choices_T) for _, choices_T in experiment.held_out)
    console.print(
        f"{len(dataset)} prompts, {held_out:,} tokens of them held out, {len(experiment.draft_ids):,} in the draft "
        f"vocabulary, {time.monotonic() - started:.0f} s"
    )
    console.print("[green]right[/]" if ahead else f"[red]WRONG[/]: the first is not ahead of the rest by {MARGIN:.0%}")
    return 0 if ahead else 1


if __name__ == "__main__":
    sys.exit(main())
