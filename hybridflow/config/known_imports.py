"""Modules, Python names, commands and options of other systems, with this package's name in place of theirs.

    python -m hybridflow.trainer.main_ppo     verl's, whose own is verl.trainer.main_ppo
    from hybridflow import GRPOTrainer        TRL's
    hybridflow grpo ...                       TRL's and NeMo-RL's

The text says what it is here. docs/coming_from.md is made from these too.
"""

from __future__ import annotations

from collections.abc import Mapping

_TRAIN = "hybridflow train RECIPE [key=value ...]"
_RUN = f"here it is {_TRAIN}; a recipe such as launch/recipes/demo.yaml has all settings"
_TRAINER = "here it is RLTrainer(model, algorithm={algorithm!r}, config=PPOConfig(...), reward_fn=...).train(prompts)"
_SETTINGS = "here it is PPOConfig(...) of every algorithm, as RLTrainer(model, algorithm={algorithm!r}, config=...)"
_GIVEN = f"here it is {_TRAIN} with algorithm.name={{algorithm}} and data.source=pairs, as in launch/recipes/algorithms"
_SUPERVISED = f"here it is {_TRAIN} with warmup: supervised training before the first rollout"
_REWARD_MODEL = "absent: reward models are not trained; reward_model.path scores with one that is"
_SCORES = "here a reward is a Python function, reward.functions: [{name: mine, path: file.py:function}]"
_BATCH = "here it is RolloutBatch, which PPOTrainer.rollout() returns"
_STAGE = "here it is Stage(name=..., module=..., num_workers=...)"
_ENGINES = "here the engines are SGLang's, rollout.engine of a recipe"
_PROMPTS = "here prompts are data.files.train of a recipe, or train(prompts) of RLTrainer"
_RUN_OR_IMPORT = f"here it is {_TRAIN}, or from hybridflow import RLTrainer, PPOTrainer"
_LAUNCH = (
    "here it is hybridflow launch slurm|kubernetes RECIPE --nodes N, or launch/ssh.sh; on one host hybridflow train"
)
_TURN = "absent: a response is one turn, without tools; reward.functions say what is paid for"
_DEVICES = "here it is placement of a recipe, such as placement.actor=cuda:0-7; how a model is cut is train.layout"
_CHECKPOINTS = "here it is checkpoint of a recipe, such as checkpoint.save_interval=10, and hybridflow checkpoint"
_PRECISE = "here it is the recipe, as PPOConfig(recipe='recipe.yaml'); common settings are PPOConfig's own"
_LORA = "absent: all weights are trained"
_ROLES = "absent: roles and their processes follow from the recipe; placement says on which devices each is"

MODULES: Mapping[str, str] = {
    # verl
    "trainer.main_ppo": _RUN,
    "trainer.main_eval": "here it is hybridflow evaluate RECIPE|RUN|MODEL",
    "trainer.main_generation": "here it is hybridflow evaluate RECIPE|RUN|MODEL, which keeps responses as texts",
    "trainer.fsdp_sft_trainer": _SUPERVISED,
    "trainer.sft_trainer": _SUPERVISED,
    "trainer.ppo": _RUN,
    "trainer.ppo.ray_trainer": _TRAINER.format(algorithm="ppo"),
    "trainer.ppo.core_algos": "here losses are in hybridflow.algorithms.losses, advantages beside them in advantages",
    "experimental": _RUN,
    "recipe": "here recipes are YAML files in launch/recipes, one for each algorithm in launch/recipes/algorithms",
    "model_merger": "here it is hybridflow checkpoint export RUN OUT",
    "scripts": "here it is hybridflow checkpoint export RUN OUT",
    "protocol": _BATCH,
    "single_controller": "here it is DataFlow and Stage, imported from hybridflow",
    "models": "here families of models are engine3d.models; docs/adding_a_model.md says how one is added",
    "utils.reward_score": _SCORES,
    "utils.flash_attn": "here it is hybridflow.is_flash_attn_available()",
    "utils.dataset": "here prompts are data.files.train of a recipe",
    "workers.reward_manager": _SCORES,
    "workers.rollout": _ENGINES,
    "workers.fsdp_workers": "absent, because Megatron-Core trains",
    "workers.megatron_workers": _ROLES,
    # TRL, OpenRLHF, the published guides
    "trainers": _RUN_OR_IMPORT,
    "trainers.dpo_trainer": _RUN,
    "trainer.ppo_trainer": _RUN_OR_IMPORT,
    "trainer.grpo_trainer": _RUN_OR_IMPORT,
    "launch": _LAUNCH,
    "launcher": _LAUNCH,
    "reward": _SCORES,
    "reward_model": _SCORES,
    "reward_fn": _SCORES,
    "envs": _TURN,
    "environments": _TURN,
    "tools": _TURN,
    "agents": _TURN,
    "placement": _DEVICES,
    "parallel": _DEVICES,
    "utils.checkpoint": _CHECKPOINTS,
    "utils.logging": "here it is metrics of a recipe, such as metrics.wandb=true",
    "train": _RUN,
    "train_async": f"{_RUN}; rollout.stream lets engines go on while models learn",
    "cli.train_ppo": _RUN,
    "cli.train_ppo_ray": _RUN,
    "cli.train_grpo": _RUN,
    "cli.train_dpo": _RUN,
    "cli.train_kto": _RUN,
    "cli.train_sft": _SUPERVISED,
    "cli.train_rm": _REWARD_MODEL,
    "cli.batch_inference": "here it is hybridflow evaluate RECIPE|RUN|MODEL",
    "rewards.accuracy_reward": "here it is path: math of reward.functions",
    # NeMo-RL, slime, prime-rl
    "algorithms.utils": _RUN,
    "distributed": "absent: Ray is started by the run; placement.cluster names one that is there",
    "distributed.virtual_cluster": "absent: Ray is started by the run; placement.cluster names one that is there",
    "models.policy": _ROLES,
    "models.generation": _ENGINES,
    "ray": _ROLES,
    "backends": "here Megatron-Core is reached by engine3d.training, SGLang by engine3d.rollout",
    "orchestrator": _RUN,
    "inference": _ENGINES,
}
"""Modules that are not there, by their name below the package; also of all modules below them."""

ATTRIBUTES: Mapping[str, str] = {
    **{f"{name.upper()}Trainer": _TRAINER.format(algorithm=name) for name in ("grpo", "rloo", "dapo", "gspo")},
    **{f"{name.upper()}Config": _SETTINGS.format(algorithm=name) for name in ("grpo", "rloo", "dapo", "gspo")},
    **{f"{name.upper()}Trainer": _GIVEN.format(algorithm=name) for name in ("dpo", "kto")},
    **{f"{name.upper()}Config": _GIVEN.format(algorithm=name) for name in ("dpo", "kto")},
    "ReinforceTrainer": _TRAINER.format(algorithm="reinforce_plus_plus"),
    "ReMaxTrainer": _TRAINER.format(algorithm="remax"),
    "OnlineDPOTrainer": _GIVEN.format(algorithm="dpo"),
    "GKDTrainer": f"here it is {_TRAIN} with algorithm.name=distillation",
    "SFTTrainer": _SUPERVISED,
    "SFTConfig": _SUPERVISED,
    "RewardTrainer": _REWARD_MODEL,
    "RewardConfig": _REWARD_MODEL,
    "RayPPOTrainer": _TRAINER.format(algorithm="ppo"),
    "Trainer": _TRAINER.format(algorithm="ppo"),
    "HybridFlowTrainer": _TRAINER.format(algorithm="ppo"),
    "AutoModelForCausalLMWithValueHead": "absent: a critic is a model of its own, critic.path of a recipe",
    "DataProto": _BATCH,
    "ResourcePool": "here it is placement.pools of a recipe",
    "ResourcePoolManager": "here it is placement.pools of a recipe",
    "RayWorkerGroup": _STAGE,
    "ActorRolloutRefWorker": _ROLES,
    "RewardManager": _SCORES,
    "RewardFunction": _SCORES,
    "Pipeline": "here it is DataFlow, whose connect(stage, stage) and run(max_steps=...) are the same",
    "load_config": "here a recipe is RLTrainer(config=PPOConfig(recipe='recipe.yaml')), or hybridflow train RECIPE",
    "HybridFlow": _TRAINER.format(algorithm="ppo"),
    "HybridTrainer": _TRAINER.format(algorithm="ppo"),
    "HybridEngine": "absent: actor and engines on the same devices of placement share weights and memory",
    **{name.upper(): _TRAINER.format(algorithm=name) for name in ("ppo", "grpo", "rloo", "dapo", "gspo")},
    "Config": _PRECISE,
    "HybridFlowConfig": _PRECISE,
    "TrainingArguments": _PRECISE,
    "CheckpointConfig": "here it is PPOConfig(checkpoint_config={'save_interval': ..., 'keep_last_k': ...})",
    "CheckpointManager": _CHECKPOINTS,
    "DeviceMapping": "here it is PPOConfig(actor_device_mapping={'model': 'cuda:0-3'})",
    "DeviceMesh": _DEVICES,
    "ParallelConfig": _DEVICES,
    "Worker": _STAGE,
    "WorkerGroup": _STAGE,
    "Actor": _ROLES,
    "ActorModel": _ROLES,
    "Critic": _ROLES,
    "CriticModel": _ROLES,
    "RewardModel": "here it is RLTrainer(model, reward_model=DIRECTORY), or reward_model.path of a recipe",
    "compute_score": _SCORES,
    "reward_fn": "here it is RLTrainer(model, reward_fn=...), a function of the texts that returns their rewards",
    "LoraConfig": _LORA,
    "LoRAConfig": _LORA,
    "PeftConfig": _LORA,
    "RolloutEngine": _ENGINES,
    "RolloutWorker": _ENGINES,
    "VLLMRollout": _ENGINES,
    "SGLangRollout": _ENGINES,
    "Dataset": _PROMPTS,
    "RLHFDataset": _PROMPTS,
    "PromptDataset": _PROMPTS,
    "DataLoader": _PROMPTS,
    "init": "absent: Ray is started by the run; PPOTrainer(...).init_distributed() starts its roles",
    "init_distributed": "here it is PPOTrainer(...).init_distributed()",
}
"""Names that other systems' packages have and this one has not."""

COMMANDS: Mapping[str, str] = {
    "run": f"here it is {_TRAIN}",
    "launch-train": f"here it is {_TRAIN}",
    "rl": f"here it is {_TRAIN}",
    "trainer": f"here it is {_TRAIN}, which starts all roles",
    "orchestrator": f"here it is {_TRAIN}, which starts all roles",
    "inference": f"here it is {_TRAIN}, which starts all roles",
    "sft": _SUPERVISED,
    "reward": _REWARD_MODEL,
    "eval": "here it is hybridflow evaluate RECIPE|RUN|MODEL",
    "test": "here it is hybridflow evaluate RECIPE|RUN|MODEL",
    "generate": "here it is hybridflow evaluate RECIPE|RUN|MODEL, which keeps responses as texts",
    "export": "here it is hybridflow checkpoint export RUN OUT",
    "merge": "here it is hybridflow checkpoint export RUN OUT",
    "convert": "here it is hybridflow checkpoint import MODEL OUT, or export RUN OUT",
    "inspect": "here it is hybridflow checkpoint inspect DIR",
    "verify": "here it is hybridflow checkpoint verify DIR",
    "config": "here a recipe is a YAML file; hybridflow init DIR writes one",
    "new": "here it is hybridflow init DIR",
    "env": "here it is hybridflow doctor RECIPE",
    "ps": "here it is hybridflow status RUN",
    "serve": "absent: RUN/model is a HuggingFace directory, which sglang.launch_server serves",
    "chat": "absent: RUN/model is a HuggingFace directory, which sglang.launch_server serves",
    "vllm-serve": "absent, because SGLang generates; a run starts its engines",
    "version": "here it is hybridflow --version",
    "help": "here it is hybridflow --help",
}
"""Commands of other systems."""

_LAUNCHED = "torchrun, launch/ssh.sh and hybridflow launch start a run on several hosts"

OPTIONS: Mapping[str, str] = {
    "role": f"is of hosts: hybridflow launch slurm RECIPE --nodes N --role train=N, or launch/ssh.sh; {_LAUNCHED}",
    "nodes": f"is of hybridflow launch slurm and kubernetes; {_LAUNCHED}",
    "nnodes": f"is of torchrun; {_LAUNCHED}",
    "nproc_per_node": f"is of torchrun; {_LAUNCHED}",
    "num_processes": "absent: placement says on which devices each role is; the run starts its processes",
    "local_rank": "absent: the run starts its processes itself",
    "config_file": "here it is hybridflow train RECIPE",
    "config_name": "here it is hybridflow train RECIPE",
    "config_path": "here it is hybridflow train RECIPE",
    "deepspeed": "absent, because Megatron-Core trains; how a model is cut is train.layout",
    "model": "here it is model.path=DIRECTORY model.create=null; hybridflow init DIR --model M writes a recipe for it",
    "data": "here it is data.files.train; hybridflow init DIR --data FILE writes a recipe for it",
    "algorithm": "here it is algorithm.name=grpo",
    "dry_run": "here it is hybridflow check RECIPE",
    "debug": "here it is the environment variable HYBRIDFLOW_LOG_LEVEL=DEBUG",
    "verbose": "here it is the environment variable HYBRIDFLOW_LOG_LEVEL=DEBUG",
    "output": "here it is run_dir=DIRECTORY; a run's directory is run_dir/name",
}
"""Options of commands, without dashes, beside the settings of recipes."""


def import_text(name: str) -> str | None:
    """The text of a module or a name in one, or of the package that it is in.

    Args:
        name: below this package, such as "trainer.main_ppo" or "data.DataProto".
    """
    parts = name.split(".")
    if (text := ATTRIBUTES.get(parts[-1])) and name not in MODULES:
        return text
    within = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((MODULES[each] for each in within if each in MODULES), None)
