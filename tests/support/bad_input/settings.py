"""Recipes and overrides: their YAML, their numbers, their device maps."""

from __future__ import annotations

from pathlib import Path

from tests.support.bad_input.place import DIGITS, Case, Place, alias_bomb, nested

RECIPES = [
    Case("digits", lambda at: at.check(f"seed: {DIGITS}"), r"recipe.yaml:2: .* 5,000 digits"),
    Case("digits-of-an-override", lambda at: at.check("", f"seed={DIGITS}"), r"override seed=9+\.\.\..* 5,000 digits"),
    Case("digits-of-a-float", lambda at: at.check(f"train: {{optimizer: {{lr: {DIGITS}.0}}}}"), r"lr"),
    Case("nested", lambda at: at.check("seed: " + nested("[", "]", 50_000)), r"recipe.yaml:2: .*nested"),
    Case("nested-some", lambda at: at.check("seed: " + nested("[", "]", 400)), r"recipe.yaml:2: .*nested"),
    Case("nested-keys", lambda at: at.check("seed: " + nested("{a: ", "}", 50_000)), r"recipe.yaml:2: .*nested"),
    Case(
        "nested-lines",
        lambda at: at.check("\n".join(" " * depth + "a:" for depth in range(600))),
        r"recipe.yaml:\d+: .*nested",
    ),
    Case(
        "nested-override", lambda at: at.check("", "seed=" + nested("[", "]", 5000)), r"override seed=\[+\.\.\..*nested"
    ),
    Case("dots", lambda at: at.check("", ".".join(["a"] * 20_000) + "=1"), r"override 'a\.a\..*expected key=value"),
    Case("alias-bomb", lambda at: at.check(alias_bomb()), r"recipe.yaml:\d+: .*10,000 values"),
    Case("alias-bomb-of-keys", lambda at: at.check(alias_bomb().replace("[", "{x: [").replace("]", "]}")), r"values"),
    Case("alias-of-itself", lambda at: at.check("seed: &a [*a]"), r"recipe.yaml:2: .*itself"),
    Case("merge-of-itself", lambda at: at.check("train: &a {<<: *a}"), r"recipe.yaml:2: .*itself"),
    Case("list-as-key", lambda at: at.check("? [1, 2]\n: 3"), r"recipe.yaml:2: .*key"),
    Case("mapping-as-key", lambda at: at.check("? {a: 2}\n: 3"), r"recipe.yaml:2: .*key"),
    Case("number-as-key", lambda at: at.check("1: 3"), r"unknown key 1"),
    Case("null-as-key", lambda at: at.check("~: 3"), r"key"),
    Case("number-as-inner-key", lambda at: at.check("train: {1: 3}"), r"unknown key train.1"),
    Case("null-byte", lambda at: at.check('model: {path: "a\\0b"}'), r"null"),
    Case("null-byte-run", lambda at: at.check('run_dir: "a\\0b"'), r"null"),
    Case("null-byte-base", lambda at: at.check('base: "a\\0b"', base=False), r"is no path"),
    Case("null-byte-raw", lambda at: at.check("name: a\0b"), r"recipe.yaml: not YAML"),
    Case("timestamp-tag", lambda at: at.check("seed: !!timestamp nonsense"), r"recipe.yaml:2: .*tag"),
    Case("int-tag", lambda at: at.check("seed: !!int nonsense"), r"recipe.yaml:2: .*tag"),
    Case("bool-tag", lambda at: at.check("seed: !!bool nonsense"), r"recipe.yaml:2: .*tag"),
    Case("python-tag", lambda at: at.check("seed: !!python/object:os.system {}"), r"recipe.yaml:2: .*tag"),
    Case("omap-tag", lambda at: at.check("seed: !!omap [1]"), r"recipe.yaml:2: .*tag"),
    Case("merge-of-a-number", lambda at: at.check("train: {<<: 1}"), r"recipe.yaml:2: "),
    Case("two-documents", lambda at: at.check("---\nseed: 1\n---\nseed: 2"), r"recipe.yaml:\d: "),
    Case("large", lambda at: at.check("# " + "x" * 40_000_000), r"recipe.yaml: .*bytes, expected at most"),
    Case("many-values", lambda at: at.check("seed: [" + "1," * 300_000 + "]"), r"recipe.yaml: .*expected at most"),
    Case("a-pipe", lambda at: ["check", at.pipe(at.directory / "recipe.yaml")], r"recipe.yaml.* named pipe"),
    Case("a-device", lambda at: ["check", at.device(at.directory / "recipe.yaml")], r"recipe.yaml.* device"),
    Case("a-directory", lambda at: ["check", at.directory], r"directory"),
    Case("base-chain", lambda at: base_chain(at, 1200), r"base: .*more than \d+ files"),
    Case(
        "base-pipe",
        lambda at: base(at, at.pipe(at.directory / "b.yaml")),
        r"recipe.yaml:1: base: .*b.yaml.* named pipe",
    ),
    Case("base-device", lambda at: base(at, Path("/dev/zero")), r"recipe.yaml:1: base: .*zero.* device"),
    Case("surrogates", lambda at: at.check('name: "\\uD800"'), r"name"),
    Case("not-a-group", lambda at: at.check("train: 5"), r"train"),
]


def base(at: Place, other: Path) -> list[object]:
    return at.check(f"base: {other}", base=False)


def base_chain(at: Place, length: int) -> list[object]:
    for number in range(length):
        at.write(f"{number}.yaml", f"base: {number + 1}.yaml\n")
    at.write(f"{length}.yaml", "seed: 1\n")
    return ["check", at.directory / "0.yaml"]


NUMBERS = [
    Case("network-ports", lambda at: at.check("", "network.ports=80"), r"network.ports.*: expected 1024 to 65535"),
    Case(
        "network-environment",
        lambda at: at.check("", "network.environment={PATH: x}"),
        r"network.environment.*'PATH' is no variable of the network",
    ),
    Case("network-preset", lambda at: at.check("", "network.preset=efa"), r"network.preset=efa is set with one host"),
    Case("reward-pipe", lambda at: at.check("", piped_reward(at)), r"reward 'mine'.*file .*mine.py is no file"),
    Case("steps-true", lambda at: at.check("", "trainer.steps=true"), r"trainer.steps = True: expected a whole number"),
    Case("lr-true", lambda at: at.check("", "train.optimizer.lr=true"), r"lr = True: expected a number"),
    Case(
        "list-of-true",
        lambda at: at.check("", "trainer.profile={steps: [true]}"),
        r"steps = \[True\]: expected",
    ),
    Case("prompts", lambda at: at.check("", "trainer.prompts_per_step=1000000000000"), r"prompts_per_step = .*at most"),
    Case("steps", lambda at: at.check("", f"trainer.steps={10**18}"), r"trainer.steps = .*at most"),
    Case("samples", lambda at: at.check("", f"rollout.samples_per_prompt={10**9}"), r"samples_per_prompt = .*at most"),
    Case("mini-batches", lambda at: at.check("", f"trainer.mini_batches={10**9}"), r"mini_batches"),
    Case("epochs", lambda at: at.check("", f"trainer.epochs={10**12}"), r"epochs = .*at most"),
    Case(
        "eval-samples",
        lambda at: at.check("", f"evaluation.eval.samples={10**12}"),
        r"evaluation.eval.samples = .*at most",
    ),
    Case("warmup", lambda at: at.check("", f"warmup.batch_size={10**12}"), r"warmup.batch_size = .*at most"),
    Case("requests", lambda at: at.check("", f"rollout.engine.max_running_requests={10**12}"), r"requests = .*at most"),
    Case("cache", lambda at: at.check("", f"rollout.engine.max_total_tokens={10**15}"), r"max_total_tokens"),
    Case("tp", lambda at: at.check("", f"train.layout.tp={10**15}"), r"tp"),
    Case("engines", lambda at: at.check("", f"rollout.engines={10**15}"), r"engines"),
    Case("micro-batch", lambda at: at.check("", f"train.micro_batch_tokens={10**15}"), r"micro_batch_tokens"),
    Case(
        "data",
        lambda at: at.check("", f"data.arithmetic={{largest_operand: {10**9}, train_size: {10**9}}}"),
        r"train_size",
    ),
    Case("operand", lambda at: at.check("", f"data.arithmetic.largest_operand={10**18}"), r"largest_operand"),
    Case("lr", lambda at: at.check("", "train.optimizer.lr=1e300"), r"train.optimizer.lr = 1e\+300: expected at most"),
    Case("lr-inf", lambda at: at.check("", "train.optimizer.lr=1e999"), r"train.optimizer.lr = inf: expected"),
    Case("eps", lambda at: at.check("", "train.optimizer.eps=1e-300"), r"train.optimizer.eps = 1e-300: expected"),
    Case("clip", lambda at: at.check("", "train.optimizer.clip_grad=1e300"), r"clip_grad = 1e\+300: expected"),
    Case(
        "temperature", lambda at: at.check("", "rollout.sampling.temperature=1e300"), r"temperature = 1e\+300: expected"
    ),
    Case("temperature-0", lambda at: at.check("", "rollout.sampling.temperature=1e-300"), r"temperature = 1e-300: exp"),
    Case("kl", lambda at: at.check("", "algorithm.kl_coef=1e300"), r"kl_coef = 1e\+300: expected"),
    Case("timeout", lambda at: at.check("", "train.timeout_s=1e300"), r"timeout_s = 1e\+300: expected at most"),
    Case(
        "weight",
        lambda at: at.check("", "reward.functions=[{name: a, path: arithmetic, weight: 1e300}]"),
        r"weight = 1e",
    ),
    Case("vocabulary", lambda at: at.check_config(vocab_size=10**12), r"vocab_size: expected at most"),
    Case("layers", lambda at: at.check_config(num_hidden_layers=10**8), r"num_hidden_layers: expected at most"),
    Case("experts", lambda at: at.check_config(num_experts=10**8), r"num_experts: expected at most"),
    Case("hidden", lambda at: at.check_config(hidden_size=10**12), r"hidden_size: expected at most"),
    Case(
        "many-small", lambda at: at.check_config(num_hidden_layers=2048, num_experts=8192), r"131,072 experts over all"
    ),
    Case(
        "no-room",
        lambda at: at.check_config(vocab_size=2**20, hidden_size=2**20, head_dim=24),
        r"run_dir: .* free, expected .* the initial model",
    ),
    Case(
        "layer-digits", lambda at: at.check("", f"model.create.config.num_hidden_layers={'9' * 4000}"), r"4,000 digits"
    ),
    Case("norm-nan", lambda at: at.check("", "model.create.config.rms_norm_eps=.nan"), r"rms_norm_eps: expected .*"),
    Case("norm-large", lambda at: at.check_config(rms_norm_eps=1e300), r"rms_norm_eps: expected .*"),
    Case("theta-inf", lambda at: at.check("", "model.create.config.rope_theta=.inf"), r"rope_theta: expected .*"),
    Case("theta-integer", lambda at: at.check_config(rope_theta=10**35), r"rope_theta: expected .*"),
    Case("positions", lambda at: at.check_config(max_position_embeddings=10**15), r"max_position_embeddings: expected"),
    Case("workers", lambda at: at.check("", reward_of(at, "workers: 100000")), r"workers = 100000: expected at most"),
    Case("many-functions", lambda at: at.check("", many_functions(at, 200)), r"reward.*processes"),
]


def reward_of(at: Place, settings: str) -> str:
    path = at.write("mine.py", "def score(generated_texts):\n    return [0.0] * len(generated_texts)\n")
    return f'reward.functions=[{{name: mine, path: "{path}:score", {settings}}}]'


def piped_reward(at: Place) -> str:
    return f'reward.functions=[{{name: mine, path: "{at.pipe(at.directory / "mine.py")}:score"}}]'


def many_functions(at: Place, count: int) -> str:
    path = at.write("mine.py", "def score(generated_texts):\n    return [0.0] * len(generated_texts)\n")
    functions = ", ".join(f'{{name: f{number}, path: "{path}:score", workers: 64}}' for number in range(count))
    return f"reward.functions=[{functions}]"


DEVICES = [
    Case(
        "cpu-many",
        lambda at: at.check("", "placement.actor=cpu:0-99999"),
        r"placement.actor: .*cpu:0-99999: there is no cpu",
    ),
    Case("cuda-many", lambda at: at.check("", "placement.actor=cuda:0-99999"), r"expected at least 200000"),
    Case("cpu-most", lambda at: at.check("", "placement.actor=cpu:0-9999999999"), r"placement.actor: .*9999999999"),
    Case("cuda-most", lambda at: at.check("", "placement.actor=cuda:9999999999"), r"placement.actor: .*9999999999"),
    Case("node-most", lambda at: at.check("", "placement.actor=node:0-9999999999"), r"placement.actor: .*9999999999"),
    Case("digits", lambda at: at.check("", f"placement.actor=cpu:{DIGITS}"), r"placement.actor: .*index"),
    Case("ranges", lambda at: at.check("", f"placement.actor='cpu:{'0-99999,' * 4000}1'"), r"placement.actor: "),
    Case("unicode-digits", lambda at: at.check("", "placement.actor='cpu:٣'"), r"placement.actor: .*not an index"),
    Case(
        "one-slot",
        lambda at: at.check("", "placement.actor=cpu:99998-99999"),
        r"actor: .* has 1024 CPU slots",
    ),
    Case(
        "slots-of-nodes",
        lambda at: at.check("", "placement.actor=cpu:0-1023", "--nodes", "16000"),
        r"at least 2048",
    ),
    Case(
        "pools", lambda at: at.check("", "placement.pools={a: 'cpu:0-99999', b: 'cpu:0-99999'}"), r"placement.pools.a: "
    ),
    Case("nodes", lambda at: at.check("", "--nodes", "1000000000"), r"--nodes 1000000000: .* at most"),
    Case("nodes-digits", lambda at: at.check("", "--nodes", DIGITS), r"--nodes"),
    Case("gpus", lambda at: at.check("", "--gpus-per-node", "1000000000"), r"--gpus-per-node 1000000000: .* at most"),
    Case("gpu-gb", lambda at: at.check("", "--gpu-gb", "1e300"), r"--gpu-gb"),
]
