"""Worker for OpenVINO GenAI: its continuous batching pipeline, plain and with a draft model.

The model is passed as GGUF, which GenAI converts and saves. Its reader takes no bfloat16: such
weights become float16, which represents them exactly except below 6e-5. Draft models are only
loaded from saved models, and only with a tokenizer; prompts are token ids, so a constant tokenizer
suffices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
import worker
from openvino import opset13 as ops

BLOCK = 16  # tokens of a cache block at least
NO_END = 0  # the end token's number has to be one; ends are ignored
FORMATS = {"bfloat16": "float16"}


class OpenVino:
    """One pipeline for each way to decode: one with a draft model cannot decode without it."""

    plain = worker.MANY
    depths, samples = True, False

    def __init__(self, options: dict[str, Any]) -> None:
        if options["device"] != "cpu":
            raise ValueError("this worker runs OpenVINO on the CPU only: leave --device at cpu")
        self.version = openvino.get_version().split("-")[0]
        self.options = options
        self.properties = {"INFERENCE_NUM_THREADS": options["threads"]}
        target = self._convert(options["model"], options["format"])
        self.alone = genai.ContinuousBatchingPipeline(
            target, self._scheduler(), "CPU", self.properties
        )
        self.drafting: Any = None
        if options["draft"]:
            draft = self._convert(options["draft"], options["draft_format"])
            beside = {"draft_model": genai.draft_model(draft, "CPU", **self.properties)}
            self.drafting = genai.ContinuousBatchingPipeline(
                target, self._scheduler(), "CPU", self.properties | beside
            )
        self.speculative = worker.MANY if self.drafting else 0

    def _scheduler(self) -> Any:
        config = genai.SchedulerConfig()
        config.num_kv_blocks = self.options["requests"] * (self.options["context"] // BLOCK + 2)
        config.max_num_seqs = self.options["requests"]
        # chunked prefill puts the draft model out of step for good (2026.4)
        config.max_num_batched_tokens = self.options["requests"] * self.options["context"]
        config.enable_prefix_caching = False
        return config

    def _convert(self, directory: str, form: str) -> str:
        """Return the directory of a converted model; written completely or not at all."""
        converted = worker.converted(self.options["converted"], directory, f"{form}.openvino")
        if converted.is_dir():
            return str(converted)
        from write_gguf import convert

        with worker.atomic_directory(converted) as work:
            file = work / "model.gguf"
            convert(Path(directory), FORMATS.get(form, form), file)
            genai.ContinuousBatchingPipeline(
                file, genai.Tokenizer(work), self._scheduler(), "CPU", enable_save_ov_model=True
            )
            file.unlink()
            save_tokenizer(work)
        return str(converted)

    def run(
        self, depth: int, prompts: worker.Prompts, tokens: int, temperature: float
    ) -> dict[str, Any]:
        """As `worker.Engine.run`."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = tokens, False, True
        config.set_eos_token_id(NO_END)
        if depth:
            config.num_assistant_tokens = depth
        pipeline = self.drafting if depth else self.alone
        watch = worker.Watch(len(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        handles = [
            pipeline.add_request(i, openvino.Tensor(np.array([prompt], np.int64)), config)
            for i, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            came = {
                i: list(handle.read().values())
                for i, handle in enumerate(handles)
                if handle.can_read()
            }
            counts = {}
            for i, (output,) in came.items():
                outputs[i] += output.generated_ids
                counts[i] = len(output.generated_ids)
            watch.step({i: count for i, count in counts.items() if count})
        answer: dict[str, Any] = watch.answer(outputs)
        return answer


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer that turns any text into token 0; it is never used for text."""
    text = ops.parameter([-1], openvino.Type.string)
    shape = ops.concat([ops.shape_of(text), ops.constant(np.array([1], np.int64))], 0)
    outputs = []
    for name, value in (("input_ids", 0), ("attention_mask", 1)):
        output = ops.broadcast(ops.constant(np.int64(value)), shape)
        output.output(0).set_names({name})
        outputs.append(ops.result(output))
    openvino.save_model(openvino.Model(outputs, [text]), directory / "openvino_tokenizer.xml")


if __name__ == "__main__":
    worker.work(OpenVino)
