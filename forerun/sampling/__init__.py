"""Sampling parameters and the filters that turn logits into the law each token is drawn from."""

from forerun.sampling.filters import SamplingState, filter_logits, shape_logits
from forerun.sampling.params import SamplingParams

__all__ = ["SamplingParams", "SamplingState", "filter_logits", "shape_logits"]
