"""TRL's GRPO on given tensors, and the cases on which it is asked: an oracle for ``realvr.maths.grpo``.

The cases are built from a seed without TRL. ``advantages`` and ``loss`` run TRL's own code, untouched: the loss method
gets our log-probabilities in place of a model's, the advantages come out of a real trainer around a tiny model whose
reward function hands out the rewards of the case. ``scripts/make_trl_goldens.py`` records the results for machines
without TRL.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VERSION = "1.16.0"
REDUCTIONS = ("grpo", "dr_grpo", "bnpo")
MAX_LENGTH = 9
# name: (shift of the log-probabilities since the rollout, beta, clip low, clip high, tokens per sequence)
CASES: dict[str, tuple[float, float, float, float, tuple[int, ...]]] = {
    "first update": (0.0, 0.0, 0.2, 0.2, (7, 3, 5, 7, 1, 2)),
    "later update": (0.5, 0.0, 0.2, 0.2, (7, 3, 5, 7, 1, 2)),
    "kl": (0.5, 0.04, 0.2, 0.2, (7, 3, 5, 7, 1, 2)),
    "uneven clip": (0.5, 0.0, 0.1, 0.3, (7, 3, 5, 7, 1, 2)),
    "an empty sequence": (0.5, 0.04, 0.2, 0.2, (7, 0, 5, 7, 1, 2)),
    "nothing generated": (0.5, 0.04, 0.2, 0.2, (0, 0, 0, 0, 0, 0)),
    "one completion": (0.5, 0.0, 0.2, 0.2, (4,)),
}
REWARDS = [
    [2.0, 1.0, 0.0, 1.0],
    [1.0, 1.0, 1.0, 1.0],
    [0.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 1.0],
    [0.25, -3.0, 0.5, 100.0],
]


def tensors(name: str) -> dict[str, Any]:
    """Inputs of one case, in float64: logp, old_logp, ref_logp, mask (n, s), advantages (n,)."""
    shift, beta, low, high, lengths = CASES[name]
    generator = torch.Generator().manual_seed(sorted(CASES).index(name))
    shape = (len(lengths), max(*lengths, 7))
    old, new, ref = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    old_logp = -old.abs()
    return {
        "logp": old_logp + shift * new,
        "old_logp": old_logp,
        "ref_logp": old_logp + shift * ref,
        "mask": torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        "advantages": torch.randn(len(lengths), generator=generator, dtype=torch.float64),
        "beta": beta,
        "clip": low,
        "clip_high": high,
    }


def loss(case: dict[str, Any], reduction: str) -> dict[str, Any]:
    """TRL's loss, its gradient by the log-probabilities, its clip fraction and its mean KL."""
    from trl import GRPOTrainer

    logp = case["logp"].clone().requires_grad_()
    count = torch.zeros_like(case["mask"], dtype=torch.long)
    inputs = {
        "prompt_ids": count[:, :1],
        "prompt_mask": count[:, :1] + 1,
        "completion_ids": count,
        "completion_mask": case["mask"].long(),
        "advantages": case["advantages"],
        "old_per_token_logps": case["old_logp"],
        "ref_per_token_logps": case["ref_logp"],
    }
    metrics: dict[str, list[float]] = defaultdict(list)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp, torch.zeros_like(logp), None),
        _metrics={"train": metrics, "eval": metrics},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        beta=case["beta"],
        current_gradient_accumulation_steps=1,
        epsilon_high=case["clip_high"],
        epsilon_low=case["clip"],
        importance_sampling_level="token",
        loss_type=reduction,
        max_completion_length=MAX_LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    value = GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[arg-type]
    value.backward()
    assert logp.grad is not None
    return {
        "loss": value.item(),
        "gradient": logp.grad.tolist(),
        "clip_fraction": metrics["clip_ratio/region_mean"][0],
        "kl": metrics["kl"][0] if case["beta"] else None,
    }


def advantages(scale: bool) -> list[list[float]]:
    """What a TRL trainer makes of ``REWARDS``."""
    from trl import GRPOConfig, GRPOTrainer

    group = len(REWARDS[0])
    handed_out = itertools.chain.from_iterable(REWARDS)
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=len(REWARDS) * group,
            num_generations=group,
            max_completion_length=2,
            scale_rewards="group" if scale else "none",
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        trainer = GRPOTrainer(
            model=_tiny_model(),
            reward_funcs=lambda completions, **kwargs: [next(handed_out) for _ in completions],
            args=config,
            train_dataset=_dataset(len(REWARDS)),
            processing_class=_tokenizer(),
        )
        trainer.model.train()
        batch = [{"prompt": f"{row}"} for row in range(len(REWARDS)) for _ in range(group)]
        out: Tensor = trainer._generate_and_score_completions(batch)["advantages"]
    return out.view(len(REWARDS), group).tolist()


def _dataset(rows: int) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"{row}" for row in range(rows)]})


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def _tiny_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=13, pad_token_id=0, eos_token_id=1, **sizes, **heads))
