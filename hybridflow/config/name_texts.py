"""Texts that several names of other systems share."""

from __future__ import annotations


def here(*settings: str, note: str = "") -> str:
    return f"here it is {' and '.join(settings)}{f'; {note}' if note else ''}"


SGLANG = "absent, because SGLang generates; its settings are rollout.engine"
MEGATRON = "absent, because Megatron-Core trains; how a model is cut is train.layout"
MICRO_BATCHES = here("train.micro_batch_tokens", note="micro-batches are made by tokens, as many as there are to be")
BALANCED = "absent, because micro-batches are always filled by tokens and balanced over the ranks"
MINI_BATCHES = here("trainer.mini_batches", note="the number of them in a step, not their size")
DEVICES = "absent, because placement says on which devices each role is, such as placement.actor=cuda:0-7"
TURNS = "absent: a response is one turn, without tools"
LORA = "absent: all weights are trained"
REWARDS = here("reward.functions", note="a list of {name: ..., path: module:function}")
EPOCHS_OF_DATA = here("trainer.epochs_of_data", note="trainer.epochs are passes over each rollout")
STEPS = here("trainer.steps")
PROMPTS = here("trainer.prompts_per_step", note="prompts, each with rollout.samples_per_prompt responses")
KL_IN_LOSS = here("algorithm.kl_coef", "algorithm.kl_in", note="kl_in=loss")
CLIP = here("algorithm.clip_low", "algorithm.clip_high")
DYNAMIC = here("algorithm.dynamic_sampling")
ROUNDS = here("algorithm.dynamic_sampling_rounds")
RESPONSE = here("rollout.sampling.max_new_tokens")
PROMPT_LENGTH = here("data.files.max_prompt_tokens", note="data.overlong_prompts is of those that leave no room")
TRAIN_FILES = here("data.files.train", note="a list of {path: ..., prompt: ..., answer: ...}, with data.source=files")
PROMPT_COLUMN = here("data.files.train", note="each source has prompt, the name of a column")
ANSWER_COLUMN = here("data.files.train", note="each source has answer, the name of a column")
OTHER_COLUMNS = "absent: a reward function gets any column for which it has a parameter of that name"
ORDER = "absent: prompts are always drawn in an order of their own, by data.seed"
TEMPLATE_ARGUMENTS = here("data.files.chat.arguments")
TEXT_ALONE = "absent: prompts are texts, and messages of texts"
OVERLONG = here("data.overlong_prompts", note="drop, cut_left, cut_right, cut_middle, or refuse")
CORRECTION = here("algorithm.correction", note="with weights, truncate, mask_low, mask_high, veto and against")
TRUNCATED = here("algorithm.correction.truncate")
ASYNC = here(
    "rollout.stream", "trainer.max_staleness", note="engines go on while models learn, on devices of their own or lent"
)
PARTIAL = here("rollout.stream.on_new_weights", note="continue, recompute or resend")
STORE = here("samples.store", note="in samples/ of the run's directory, which hybridflow samples shows")
TOKENIZER = "absent: the tokenizer is that in the model's directory"
TP = here("train.layout.tp", note="of the engines rollout.engine.tp")

OF_A_SET = "evaluation.NAME has the same for another set"
EVALUATED = here("evaluation", note="{NAME: {data: {path: ...}}}; with data.source=jsonl also data.jsonl.eval_path")
OF_EACH_SET = here("evaluation", note="{NAME: {samples: ..., temperature: ..., sampling: {...}}}")
INTERVAL = here("evaluation.eval.interval", note=OF_A_SET)
ALONE = "absent: hybridflow evaluate measures a model without training"
CONTEXT = here("rollout.engine.context_length", note="of prompt and response; of the response sampling.max_new_tokens")
COLOCATED = "absent: roles whose placement is the same devices share them"
STALENESS = here("trainer.max_staleness", note="with rollout.stream above 1")
REPLICAS = "absent: the layout is repeated on all of a role's devices; engines are rollout.engines"
QUANTISED = "absent: models are trained and served in bfloat16 or float32"
ENVIRONMENTS = "absent: a response is one turn; prompts are data.files, what is paid for is reward.functions"
LOG_LEVEL = "absent: the environment variable HYBRIDFLOW_LOG_LEVEL says it"
