"""Every algorithm by its name, and where it is. Imports none of them, so that names can be checked at no cost."""

from __future__ import annotations

import difflib

from hybridflow.algorithms.own_files import absolute, is_own

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


def is_known(name: str) -> bool:
    """True for the name of an algorithm, or of one in a file of the user."""
    return name in ALGORITHMS or is_own(name)


def known(name: str) -> str:
    """Return the name of an algorithm; of one in a file, "file.py:NAME", with an absolute path. ValueError for any
    other.
    """
    if is_own(name):
        return absolute(name)
    if name not in ALGORITHMS:
        names = " or ".join(map(repr, ALGORITHMS))
        plain = name.lower().replace("++", "_plus_plus").replace("-", "_")
        near = difflib.get_close_matches(plain, ALGORITHMS, n=1, cutoff=0.7)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"{name!r} is no algorithm{meant}, expected {names}, or 'file.py:ALGORITHM' of a file of your own"
        )
    return name
