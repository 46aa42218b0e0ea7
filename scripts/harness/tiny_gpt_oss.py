# SPDX-License-Identifier: MIT
"""A gpt-oss of three million parameters that has learned to predict bytes of Python's own sources.

Small enough to keep in the repository, and trained, so that quantising its experts is judged on
structure and not on noise. It has what gpt-oss has: sinks, sliding windows in every other layer,
YaRN, eight experts with the clamped SwiGLU of which four run. A token is a byte.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from harness.finetune import load_state
from harness.folder import atomic_folder
from harness.model_factory import Shape, config_of
from harness.tiny_needle import NeedleSamples, key_loss
from harness.tokenizer import save_tokenizer
from oss_fused.errors import CheckpointError, DatasetError

# 256 bytes and the special tokens of gpt-oss
SHAPE = Shape("gpt-oss", 4, 192, 128, 4, 2, 64, 265, 2048, 150000.0, 8, 4, sliding_window=128)
TRAINED_CONTEXT = 512
# modules that training never sees; nor their tests
HELD_OUT = ("csv", "fractions", "heapq", "queue", "shlex", "statistics", "textwrap", "wave")
# left out: tables of numbers
_LEFT_OUT = ("site-packages", "dist-packages", "encodings", "__pycache__", "lib2to3", "turtledemo")
STATE = "training-state.pt"
# of the mean loss of a pass key's tokens, beside that of all tokens
_KEY_WEIGHT = 0.5


@dataclass(frozen=True)
class Training:
    """Settings of a run.

    Attributes:
        steps: optimizer steps.
        seconds: the learning rate reaches zero and training ends after that many, if not before.
        batch: samples of TRAINED_CONTEXT bytes per step.
        learning_rate: of AdamW, after warm-up; falls to zero in a straight line.
        balance: weight of the loss that keeps every expert in use.
        seed: of weights and batches.
        save_every: steps between saved states.
        start: folder of a checkpoint to train further, bf16 or MXFP4; None starts from noise.
        texts: files to learn from, of which the last tenth is held out; none takes ``corpus``.
        needle: positions of a context in which the model learns to find a pass key, in every
            sample (see tiny_needle); None trains text alone, with SHAPE's context.
    """

    steps: int = 4000
    seconds: float | None = None
    batch: int = 64
    learning_rate: float = 2e-3
    balance: float = 0.02
    seed: int = 0
    save_every: int = 500
    start: str | None = None
    texts: tuple[str, ...] = ()
    needle: int | None = None

    def rate(self, step: int, seconds: float) -> float:
        """Learning rate of a step."""
        warm = min(1.0, (step + 1) / (0.02 * self.steps + 1))
        return self.learning_rate * warm * (1 - self.progress(step, seconds))

    def progress(self, step: int, seconds: float) -> float:
        """Share of the run that is over."""
        spent = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(step / self.steps, spent))


def corpus() -> tuple[bytes, bytes]:
    """Sources of the running Python's standard library: for training, and held out.

    Raises:
        DatasetError: they are not installed.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    held = {f"{prefix}{name}.py" for name in HELD_OUT for prefix in ("", "test_")}
    train = bytearray()
    for path in sorted(library.rglob("*.py")):
        if not set(path.relative_to(library).parts) & set(_LEFT_OUT) and path.name not in held:
            data = path.read_bytes()
            if data.isascii():
                train += data + b"\n"
    held_out = b"\n".join(
        path.read_bytes() for name in HELD_OUT if (path := library / f"{name}.py").is_file()
    )
    if len(train) < 2**20 or len(held_out) < 2**14:
        raise DatasetError(f"standard library in {library}: its sources are not there")
    return bytes(train), held_out


def read_texts(paths: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Files one after the other: nine tenths for training, and the rest.

    Raises:
        DatasetError: one cannot be read, or together they are too short.
    """
    try:
        text = b"\n".join(Path(path).read_bytes() for path in paths)
    except OSError as error:
        raise DatasetError(f"--text {error.filename}: cannot be read: {error.strerror}") from None
    cut = len(text) * 9 // 10
    if len(text) - cut <= TRAINED_CONTEXT:
        raise DatasetError(
            f"--text: {len(text)} bytes in all; expected more than {10 * TRAINED_CONTEXT}"
        )
    return text[:cut], text[cut:]


def token_table(tokenizer: Any) -> torch.Tensor:
    """Token id of each byte [256], -1 for those that UTF-8 never uses."""
    # one character of each lead byte and all of two bytes: every byte that occurs
    points = [*range(0x800), *range(0x800, 0xD800, 64), *range(0x10000, 0x110000, 4096)]
    text = "".join(map(chr, points))
    table = torch.full((256,), -1)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    table[torch.tensor(list(text.encode()))] = torch.tensor(ids)
    return table


def build(seed: int, context: int = SHAPE.context) -> Any:
    """The untrained model, a GptOssForCausalLM in float32 whose experts all run."""
    import transformers

    auto: Any = transformers
    config = config_of(SHAPE, "bf16", {"bos": 256, "eos": 258, "pad": 257})
    scaling = config["rope_scaling"] | {"rope_theta": config.pop("rope_theta")}
    config["rope_scaling"] = scaling | {
        "factor": context / TRAINED_CONTEXT,
        "original_max_position_embeddings": TRAINED_CONTEXT,
    }
    config |= {"initial_context_length": TRAINED_CONTEXT, "max_position_embeddings": context}
    torch.manual_seed(seed)
    model = auto.GptOssForCausalLM(auto.GptOssConfig(**config)).float()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.forward = partial(dense_experts, experts)
    return model


def dense_experts(
    experts: Any, hidden: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """All experts on all tokens, weighted by the router, as two matrix products.

    Twice the arithmetic of four experts of eight, and still the fastest for training: nothing is
    sorted and no expert waits for its token count.

    Args:
        experts: transformers' GptOssExperts.
        hidden: [T, H].
        router_indices: [T, K].
        routing_weights: [T, K].
    """
    count = experts.num_experts
    mix = routing_weights.new_zeros(len(hidden), count).scatter(1, router_indices, routing_weights)
    gate_up = hidden @ experts.gate_up_proj.transpose(0, 1).flatten(1)
    gate_up = gate_up.unflatten(1, (count, -1)) + experts.gate_up_proj_bias
    gated = experts._apply_gate(gate_up) * mix.unsqueeze(-1)
    return gated.flatten(1) @ experts.down_proj.flatten(0, 1) + mix @ experts.down_proj_bias


def balance_loss(router_logits: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Load-balancing loss (Switch Transformer, equation 4) and the share of each expert.

    Args:
        router_logits: per layer [T, E].

    Returns:
        The loss, 1 when the load is even; the share of tokens [layers, E] that each expert gets.
    """
    logits = torch.stack([layer.float() for layer in router_logits])
    chosen = logits.topk(SHAPE.top_k, dim=-1).indices
    load = torch.zeros_like(logits).scatter(-1, chosen, 1.0).mean(1)
    share = logits.softmax(-1).mean(1)
    return (load * share).sum(-1).mean() * SHAPE.experts / SHAPE.top_k, load


class Trainer:
    """Trains the model; its state can be saved and loaded at any step."""

    def __init__(self, settings: Training, device: torch.device, tokenizer: Any) -> None:
        """Make model, optimizer and data."""
        self.settings, self.device = settings, device
        self.model = build(settings.seed, settings.needle or SHAPE.context).to(device).train()
        if settings.start is not None:
            self.model.load_state_dict(load_state(Path(settings.start)))
        decayed = [p for n, p in self.model.named_parameters() if n.endswith(("weight", "proj"))]
        known = {id(p) for p in decayed}
        others = [p for p in self.model.parameters() if id(p) not in known]
        groups: list[dict[str, Any]] = [
            {"params": decayed},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        table = token_table(tokenizer)
        texts = read_texts(settings.texts) if settings.texts else corpus()
        train, held_out = (
            table[torch.frombuffer(bytearray(text), dtype=torch.uint8).int()] for text in texts
        )
        self.train, self.held_out = train.to(device), held_out.to(device)
        self.needles = settings.needle and NeedleSamples(
            train, table, TRAINED_CONTEXT, settings.needle, settings.seed
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.step, self.seconds, self.load = 0, 0.0, torch.zeros(SHAPE.layers, SHAPE.experts)

    def run(self, report: Callable[[int, float, float], None], state: Path) -> None:
        """Train to the end, from ``state`` if it is there.

        Args:
            report: called after a step with its number, the loss and the seconds since the start;
                every tenth step only, since reading a loss waits for the device.
            state: file that holds everything, rewritten every ``save_every`` steps.
        """
        if state.is_file():
            self._restore(state)
        began = time.monotonic() - self.seconds
        while self.settings.progress(self.step, self.seconds) < 1:
            loss = self._train_step()
            if self.step % 10 == 0:
                report(self.step, float(loss), self.seconds)
            self.seconds = time.monotonic() - began
            if self.step % self.settings.save_every == 0:
                self._save(state)

    def _train_step(self) -> torch.Tensor:
        rate = self.settings.rate(self.step, self.seconds)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        ids, positions = self._batch()
        with self._autocast():
            output = self.model(
                ids[:, :-1], position_ids=positions, use_cache=False, output_router_logits=True
            )
        losses = cross_entropy(
            output.logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        loss = losses.mean()
        if self.needles:
            loss = loss + _KEY_WEIGHT * key_loss(losses.unflatten(0, (len(ids), -1)))
        balance, self.load = balance_loss(output.router_logits)
        (loss + self.settings.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids [batch, TRAINED_CONTEXT + 1], and positions unless they are consecutive."""
        if self.needles:
            ids, positions = self.needles.batch(self.settings.batch, self.step)
            return ids.to(self.device), positions.to(self.device)
        starts = torch.randint(
            len(self.train) - TRAINED_CONTEXT, (self.settings.batch, 1), generator=self.generator
        )
        return self.train[(starts + torch.arange(TRAINED_CONTEXT + 1)).to(self.device)], None

    @torch.no_grad()
    def evaluate(self, batch: int = 16) -> float:
        """Mean loss in nats per byte over the held-out text, in windows of TRAINED_CONTEXT."""
        count = len(self.held_out) // (TRAINED_CONTEXT + 1)
        windows = self.held_out[: count * (TRAINED_CONTEXT + 1)].view(count, -1)
        losses = []
        for ids in windows.split(batch):
            with self._autocast():
                logits = self.model(ids[:, :-1], use_cache=False).logits
            loss = cross_entropy(
                logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            )
            losses.append(loss)
        return float(torch.cat(losses).mean())

    def _autocast(self) -> torch.autocast:
        # most CPUs have no bf16 arithmetic and emulate it
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _save(self, state: Path) -> None:
        scratch = state.with_suffix(".tmp")
        content = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(content, scratch)
        scratch.replace(state)

    def _restore(self, state: Path) -> None:
        content = torch.load(state, map_location=self.device, weights_only=True)
        if content["settings"] != asdict(self.settings):
            raise CheckpointError(
                f"{state}: was made with {content['settings']}; expected {asdict(self.settings)}; "
                f"remove it to start over"
            )
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.generator.set_state(content["generator"].cpu())
        self.step, self.seconds = content["step"], content["seconds"]


@contextmanager
def rounded(model: Any) -> Iterator[None]:
    """Within the block the weights have the values that a bf16 checkpoint keeps."""
    exact = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in exact.items()})
    yield
    model.load_state_dict(exact)


def train_tiny(
    output: Path,
    settings: Training,
    device: torch.device,
    report: Callable[[int, float, float], None],
) -> dict[str, Any]:
    """Train and write the checkpoint to ``output``; return what the run was and came to.

    A state file beside ``output`` lets the same call go on after an interruption.

    Raises:
        CheckpointError: ``output`` exists, or the state is of other settings.
        DatasetError: the standard library's sources are not there.
    """
    state = output.with_name(f"{output.name}.{STATE}")
    with atomic_folder(output) as folder:
        ids = save_tokenizer(folder, "gpt-oss", SHAPE.vocab, settings.needle or SHAPE.context)
        from transformers import AutoTokenizer

        trainer = Trainer(settings, device, AutoTokenizer.from_pretrained(folder))
        trainer.run(report, state)
        trainer.model.eval()
        with rounded(trainer.model):
            loss = trainer.evaluate()
        model = trainer.model.to("cpu", torch.bfloat16)
        model.generation_config.eos_token_id = ids["eos"]
        model.save_pretrained(folder)
    state.unlink(missing_ok=True)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": asdict(settings),
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "training_bytes": len(trainer.train),
        "held_out_bytes": len(trainer.held_out),
        "held_out_nats_per_byte": round(loss, 4),
        "held_out_perplexity": round(math.exp(loss), 4),
        "least_expert_share": round(float(trainer.load.min()) / SHAPE.top_k, 4),
        "most_expert_share": round(float(trainer.load.max()) / SHAPE.top_k, 4),
    }
