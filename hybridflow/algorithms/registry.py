"""Every algorithm by its name, and where it is. Imports none of them, so that names can be checked at no cost."""

from __future__ import annotations

ALGORITHMS: dict[str, str] = {
    "grpo": "hybridflow.algorithms.grpo",
    "ppo": "hybridflow.algorithms.ppo",
    "ippo": "hybridflow.algorithms.ippo",
    "vapo": "hybridflow.algorithms.vapo",
    "pf_ppo": "hybridflow.algorithms.pf_ppo",
    "safe_rlhf": "hybridflow.algorithms.safe_rlhf",
    "remax": "hybridflow.algorithms.remax",
    "rloo": "hybridflow.algorithms.rloo",
    "reinforce_plus_plus": "hybridflow.algorithms.reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "hybridflow.algorithms.reinforce_plus_plus_baseline",
    "dr_grpo": "hybridflow.algorithms.dr_grpo",
    "gpg": "hybridflow.algorithms.gpg",
    "opo": "hybridflow.algorithms.opo",
    "pass_at_k": "hybridflow.algorithms.pass_at_k",
    "dapo": "hybridflow.algorithms.dapo",
    "gspo": "hybridflow.algorithms.gspo",
    "gspo_token": "hybridflow.algorithms.gspo_token",
    "cispo": "hybridflow.algorithms.cispo",
    "sapo": "hybridflow.algorithms.sapo",
    "clip_cov": "hybridflow.algorithms.clip_cov",
    "kl_cov": "hybridflow.algorithms.kl_cov",
    "dpo": "hybridflow.algorithms.dpo",
    "kto": "hybridflow.algorithms.kto",
    "distillation": "hybridflow.algorithms.distillation",
}
"""The module of each, which has the algorithm as `ALGORITHM`."""


def known(name: str) -> str:
    """The name of an algorithm. Raises ValueError for any other."""
    if name not in ALGORITHMS:
        raise ValueError(f"{name!r} is no algorithm, expected {' or '.join(map(repr, ALGORITHMS))}")
    return name
