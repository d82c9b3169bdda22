"""What a causal model says about given responses, without the logits of the prompt or of padding.

Used by the reference scorer (frozen) and by the learner (with gradient), so that both compute the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo_kit.errors import ModelError
from oppo_kit.ops.batching import PaddedRows
from oppo_kit.ops.logprobs import token_logprobs

# Two forwards of one float32 model through other kernels differ by rounding only; half precision by its epsilon.
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_PROBE_TOLERANCE_HALF = 0.1
# What reading a model can raise when it is built otherwise.
_PROBE_ERRORS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)


def causal_model(policy: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself.

    Raises:
        ModelError: it is no transformers model, or an encoder-decoder.
    """
    get_base_model = getattr(policy, "get_base_model", None)
    model = get_base_model() if get_base_model is not None else policy
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{type(policy).__name__} is no transformers model; load it with AutoModelForCausalLM"
        )
    if model.config.is_encoder_decoder:
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder; only decoders, where the response continues the prompt, "
            "can be trained: load one with AutoModelForCausalLM"
        )
    return model


def context_tokens(config: Any) -> int | None:
    """Positions that a model can be read at; None when its config does not say.

    Beyond ``original_max_position_embeddings``, rotary factors of the type LongRoPE change for all rows of a pass, so
    that a row's numbers would depend on its neighbours, and what was cached before would no longer fit.
    """
    text_config = config.get_text_config()
    limits = [getattr(text_config, "max_position_embeddings", None)]
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = getattr(text_config, "original_max_position_embeddings", None)
        limits.append(rope.get("original_max_position_embeddings") or original)
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known, default=None)


def cache_keyword(model: nn.Module) -> str:
    """Name of the KV cache's keyword: ``cache`` since transformers 5.24, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def response_logprobs(policy: nn.Module, rows: PaddedRows, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of every response token.

    Args:
        policy: a causal language model, PEFT-wrapped or not.
        rows: right-padded prompt + response rows on the model's device.
        temperature: of the distribution that the tokens were sampled from.

    Returns:
        log-probs [r, t] float32 with gradient (0 past a row's end), entropy [r, t] float32 without.
    """
    model = causal_model(policy)
    mask = rows.response_mask
    hidden = model.base_model(input_ids=rows.input_ids, use_cache=False).last_hidden_state
    row_index, token_index = torch.nonzero(mask, as_tuple=True)
    chosen = hidden[row_index, rows.predictor_index[row_index, token_index]]
    logprobs, entropy = token_logprobs(
        chosen,
        rows.response_ids[row_index, token_index],
        logits_head(model),
        vocab_size=model.config.get_text_config().vocab_size,
        temperature=temperature,
    )
    shape = (row_index, token_index)
    empty = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return empty.index_put(shape, logprobs), empty.index_put(shape, entropy)


def token_values(critic: nn.Module, rows: PaddedRows) -> Tensor:
    """[r, t] float32 critic values at the positions where the response tokens are chosen.

    Args:
        critic: a sequence classifier with one label, whose score head reads any position.
        rows: right-padded prompt + response rows on the model's device.
    """
    hidden = classifier_backbone(critic)(input_ids=rows.input_ids, use_cache=False).last_hidden_state
    index = rows.predictor_index[..., None].expand(-1, -1, hidden.shape[-1])
    return score_head(critic)(hidden.gather(1, index)).squeeze(-1).float()


def sequence_scores(classifier: nn.Module, rows: PaddedRows) -> Tensor:
    """[r] float32 scores, read at the explicit last token of each row, whatever pad and EOS are."""
    hidden = classifier_backbone(classifier)(input_ids=rows.input_ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(hidden.shape[0], device=hidden.device), rows.last_index]
    return score_head(classifier)(last).squeeze(-1).float()


def classifier_backbone(classifier: nn.Module) -> nn.Module:
    """The decoder below the score head."""
    return getattr(classifier, str(getattr(classifier, "base_model_prefix", "")), None) or _no_classifier(
        classifier
    )


def score_head(classifier: nn.Module) -> nn.Module:
    """The linear head that every position can be read with."""
    return getattr(classifier, "score", None) or _no_classifier(classifier)


def check_one_score(classifier: nn.Module, role: str) -> None:
    """A reward model or critic has a backbone and a head that gives one number per position, whatever follows it.

    Args:
        classifier: a sequence classifier.
        role: what it is used as, for the error.

    Raises:
        ModelError: it lacks one, its head gives several numbers, or padding behind a row changes them.
    """
    _probe_padding(classifier, role)
    num_labels = getattr(score_head(classifier), "out_features", 1)
    if num_labels != 1:
        raise ModelError(
            f"the {role} ({type(classifier).__name__}) gives {num_labels} scores per position, but one is needed; "
            "load it with num_labels=1, from a checkpoint trained with one label"
        )


@torch.no_grad()
def _probe_padding(classifier: nn.Module, role: str) -> None:
    """Compare the last hidden state of a short row alone with the same beside a longer one."""
    backbone: Any = classifier_backbone(classifier)
    parameter = next(backbone.parameters())
    input_ids = torch.arange(7, device=parameter.device)[None, :] * 5 % _vocab_size(classifier)
    try:
        expected = backbone(input_ids=input_ids[:, :4], use_cache=False).last_hidden_state[0, -1].float()
        actual = backbone(input_ids=input_ids, use_cache=False).last_hidden_state[0, 3].float()
    except _PROBE_ERRORS as error:
        raise ModelError(
            f"the {role} ({type(classifier).__name__}) cannot be read as a decoder: {type(error).__name__}: {error}; "
            "load a decoder with AutoModelForSequenceClassification and num_labels=1"
        ) from error
    gap = float((actual - expected).square().mean().sqrt()) / max(float(expected.std()), 1e-3)
    if not gap <= _PROBE_TOLERANCE.get(parameter.dtype, _PROBE_TOLERANCE_HALF) and expected.isfinite().all():
        raise ModelError(
            f"the {role} ({type(classifier).__name__}) is no causal decoder: its last hidden state differs "
            f"by {gap:.2g} standard deviations when padding follows, so that scores depend on the other rows; use a "
            "decoder whose tokens see nothing behind them"
        )


def _vocab_size(model: Any) -> int:
    return model.config.get_text_config().vocab_size


def logits_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """From last hidden states to logits as the model itself would make them: scale and soft cap included."""
    embeddings: Any = model.get_output_embeddings()
    config: Any = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(model, "logit_scale", None) or getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)

    def head(hidden: Tensor) -> Tensor:
        logits = embeddings(hidden)
        if scale is not None:
            logits = logits * scale
        if divisor is not None:
            logits = logits / divisor
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return head


@torch.no_grad()
def probe_causal_model(policy: nn.Module) -> None:
    """Compare our route to the logits (no mask, right padding, own head) with the model's own, on two rows.

    Raises:
        ModelError: they differ, so the model cannot be trained here (names the difference), or are not finite.
    """
    model = causal_model(policy)
    vocab_size = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device
    lengths = torch.tensor([7, 4], device=device)
    input_ids = (torch.arange(14, device=device) * 31 % vocab_size).reshape(2, 7)
    mask = torch.arange(7, device=device)[None, :] < lengths[:, None]
    expected = model(input_ids=input_ids, attention_mask=mask.long(), use_cache=False).logits
    if not expected[mask].isfinite().all():
        raise ModelError(
            f"the logits of {type(model).__name__} are not finite, so it cannot be trained; its weights hold NaN or "
            f"infinities, or overflow in {expected.dtype}: pass an undamaged checkpoint, or float32 or bfloat16"
        )
    try:
        hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        actual = logits_head(model)(hidden)
    except _PROBE_ERRORS as error:
        raise ModelError(
            f"{type(model).__name__} cannot be trained: its backbone and output head cannot be read apart "
            f"({type(error).__name__}: {error}); use a decoder whose logits follow from its last hidden state"
        ) from error
    scale = max(float(expected[mask].float().std()), 1e-3)
    # The worst position's root mean square. The largest difference says little: between two attention kernels, the
    # logits of 36 layers in bfloat16 differ by 0.04 standard deviations like this, and by 0.26 at the worst of 10^6.
    gap = float((actual - expected)[mask].float().square().mean(-1).sqrt().max()) / scale
    if not gap <= _PROBE_TOLERANCE.get(actual.dtype, _PROBE_TOLERANCE_HALF):
        raise ModelError(
            f"{type(model).__name__} cannot be trained: its logits differ from backbone + output head by {gap:.2g} "
            "standard deviations on right-padded rows; use a decoder whose logits follow from its last hidden state"
        )


def _no_classifier(classifier: nn.Module) -> nn.Module:
    raise ModelError(
        f"{type(classifier).__name__} has no backbone with a 'score' head; "
        "use a decoder's AutoModelForSequenceClassification with num_labels=1"
    )
