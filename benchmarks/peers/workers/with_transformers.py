"""Worker for transformers: `generate`, and assisted generation with a constant draft length.

Drafts come from an assistant model or from transformers' prompt lookup.
"""

from __future__ import annotations

from typing import Any

import worker

FIRST_PAD = 0  # any token: padding is masked


class Transformers:
    """A target and its assistant; assisted generation takes one request at a time."""

    plain = worker.MANY
    depths = samples = True

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(options["threads"])
        self.version = transformers.__version__
        self.device = options["device"]
        self.target = self._load(options["model"], options["format"])
        self.assistant: Any = (
            self._load(options["draft"], options["format"]) if options["draft"] else None
        )
        self.speculative = 1 if self.assistant is not None or options["lookup"] else 0

    def _load(self, directory: str, form: str) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        model = (
            AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, form))
            .to(self.device)
            .eval()
        )
        model.generation_config.eos_token_id = None  # every output has the length asked for
        model.generation_config.pad_token_id = FIRST_PAD
        return model

    def run(
        self, depth: int, prompts: worker.Prompts, tokens: int, temperature: float
    ) -> dict[str, Any]:
        """As `worker.Engine.run`. Shorter prompts are padded on the left."""
        import torch

        longest = max(map(len, prompts))
        missing = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor(
            [[FIRST_PAD] * m + p for m, p in zip(missing, prompts, strict=True)], device=self.device
        )
        mask = torch.tensor([[0] * m + [1] * (longest - m) for m in missing], device=self.device)
        watch = worker.Watch(len(prompts))
        more = self._drafting(depth) if depth else {}
        torch.manual_seed(0)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:  # without the filters of the model's own settings
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            whole = self.target.generate(
                ids,
                attention_mask=mask,
                **sampling,
                max_new_tokens=tokens,
                streamer=Streamer(watch),
                **more,
            )
        answer: dict[str, Any] = watch.answer(whole[:, longest:].tolist())
        return answer

    def _drafting(self, depth: int) -> dict[str, Any]:
        if self.assistant is None:
            return {"prompt_lookup_num_tokens": depth}
        config = self.assistant.generation_config
        config.num_assistant_tokens = depth
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0  # never stops before the depth
        return {"assistant_model": self.assistant}


class Streamer:
    """Streamer that records each pass: `generate` puts the prompts first, then new tokens."""

    def __init__(self, watch: worker.Watch) -> None:
        self.watch, self.prompts_came = watch, False

    def put(self, value: Any) -> None:
        """Record tokens of one pass: [requests], or [1, accepted] in assisted generation."""
        if self.prompts_came:
            self.watch.step(
                {0: value.shape[1]} if value.dim() == 2 else dict.fromkeys(range(len(value)), 1)
            )
        self.prompts_came = True

    def end(self) -> None:
        """Do nothing: all passes are recorded."""


if __name__ == "__main__":
    worker.work(Transformers)
