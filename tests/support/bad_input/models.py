"""Models: configs, tokenizers, safetensors files and their index."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.bad_input.place import DIGITS, Case, Place, nested

MODELS = [
    Case(
        "nested-config",
        lambda at: at.check_model(at.model(config__json=nested("[", "]", 100_000))),
        r"config.json: .*nested",
    ),
    Case(
        "nested-key",
        lambda at: at.check_model(at.model(config__json=nested('{"a":', "}", 900))),
        r"config.json: .*nested",
    ),
    Case(
        "digits",
        lambda at: at.check_model(at.model(config__json=f'{{"vocab_size": {DIGITS}}}')),
        r"config.json: .*digits",
    ),
    Case(
        "config-digits",
        lambda at: at.check_model(at.model(config__json=f'{{"rope_theta": {"9" * 400}}}')),
        r"config.json: .*digits",
    ),
    Case("config-list", lambda at: at.check_model(at.model(config__json="[]")), r"config.json: expected a JSON object"),
    Case("config-binary", lambda at: at.check_model(at.model(config__json=b"\xff\xfe\x00")), r"config.json: "),
    Case("config-null", lambda at: at.check_model(at.model(config__json=b"\0" * 100)), r"config.json: not"),
    Case("config-large", lambda at: large_config(at), r"config.json: .*expected at most"),
    Case("config-pipe", lambda at: with_pipe(at, "config.json"), r"config.json.* named pipe"),
    Case("config-device", lambda at: with_device(at, "config.json"), r"config.json.* device"),
    Case("norm-nan", lambda at: at.check_model(at.config(rms_norm_eps=float("nan"))), r"rms_norm_eps: expected"),
    Case(
        "theta-inf",
        lambda at: at.check_model(at.config(rope_parameters={"rope_type": "default", "rope_theta": 1e999})),
        r"rope_theta: expected",
    ),
    Case("layer-types", lambda at: at.check_model(at.config(layer_types=5)), r"layer_types: expected"),
    Case("architectures", lambda at: at.check_model(at.config(architectures=5)), r"architectures: expected"),
    Case("architectures-lists", lambda at: at.check_model(at.config(architectures=[[1]])), r"architectures: expected"),
    Case("rope-list", lambda at: at.check_model(at.config(rope_parameters=[1])), r"rope_parameters: expected"),
    Case(
        "rope-type-list", lambda at: at.check_model(at.config(rope_parameters={"rope_type": [1]})), r"rope_parameters: "
    ),
    Case(
        "tokenizer-list",
        lambda at: at.check_model(at.model(tokenizer_config__json="[]")),
        r"tokenizer_config.json: expected",
    ),
    Case(
        "tokenizer-nested",
        lambda at: at.check_model(at.model(tokenizer_config__json=nested("[", "]", 100_000))),
        r"tokenizer_config.json: .*nested",
    ),
    Case(
        "tokenizer-some",
        lambda at: at.check_model(at.model(tokenizer_config__json=nested('{"a":', "}", 900))),
        r"tokenizer_config.json: .*nested",
    ),
    Case(
        "tokenizer-empty",
        lambda at: at.check_model(at.model(tokenizer_config__json="{}", tokenizer__json="{}")),
        r"tokenizer",
    ),
    Case(
        "tokenizer-class",
        lambda at: at.check_model(at.model(tokenizer_config__json='{"tokenizer_class": [1]}')),
        r"tokenizer",
    ),
    Case(
        "tokenizer-token",
        lambda at: at.check_model(at.model(tokenizer_config__json='{"eos_token": [1]}')),
        r"tokenizer",
    ),
    Case(
        "tokenizer-added",
        lambda at: at.check_model(at.model(tokenizer_config__json='{"added_tokens_decoder": [1]}')),
        r"tokenizer",
    ),
    Case("tokenizer-model", lambda at: at.check_model(at.model(tokenizer__json='{"model": 5}')), r"tokenizer"),
    Case(
        "tokenizer-binary",
        lambda at: at.check_model(at.model(tokenizer_config__json=b"\xff\xfe")),
        r"tokenizer_config.json: ",
    ),
    Case(
        "tokenizer-deep", lambda at: at.check_model(at.model(tokenizer__json=nested("[", "]", 100_000))), r"tokenizer"
    ),
    Case("tokenizer-pipe", lambda at: with_pipe(at, "tokenizer.json"), r"tokenizer.json.* named pipe"),
    Case(
        "tokenizer-config-pipe",
        lambda at: with_pipe(at, "tokenizer_config.json"),
        r"tokenizer_config.json.* named pipe",
    ),
    Case(
        "special-tokens-pipe",
        lambda at: with_pipe(at, "special_tokens_map.json"),
        r"special_tokens_map.json.* named pipe",
    ),
    Case("added-tokens-device", lambda at: with_device(at, "added_tokens.json"), r"added_tokens.json.* device"),
    Case("chat-template-device", lambda at: with_device(at, "chat_template.jinja"), r"chat_template.jinja.* device"),
    Case(
        "generation-nested",
        lambda at: at.check_model(at.model(generation_config__json=nested("[", "]", 100_000))),
        r"generation_config.json: .*nested",
    ),
    Case("generation-pipe", lambda at: with_pipe(at, "generation_config.json"), r"generation_config.json.* named pipe"),
    Case(
        "generation-list",
        lambda at: at.check_model(at.model(generation_config__json="[]")),
        r"generation_config.json: expected",
    ),
]


def large_config(at: Place) -> Sequence[object]:
    model = at.model()
    at.sparse(model / "config.json", 3 << 30, b"{")
    return at.check_model(model)


def with_pipe(at: Place, name: str) -> Sequence[object]:
    model = at.model()
    at.pipe(model / name)
    return at.check_model(model)


def with_device(at: Place, name: str) -> Sequence[object]:
    model = at.model()
    at.device(model / name)
    return at.check_model(model)


WEIGHTS = [
    Case("header-nested", lambda at: with_header(at, nested("[", "]", 100_000)), r"model.safetensors: .*nested"),
    Case("header-digits", lambda at: with_header(at, tensor(f"[{DIGITS}]")), r"model.safetensors: .*digits"),
    Case("header-list", lambda at: with_header(at, "[]"), r"model.safetensors: .*header"),
    Case("header-binary", lambda at: with_header(at, b"\xff\xfe"), r"model.safetensors: "),
    Case("header-sparse", lambda at: sparse_header(at), r"model.safetensors: .*header of 3,000,000,000 bytes"),
    Case("header-strings", lambda at: with_header(at, tensor('"12"')), r"tensor"),
    Case("header-negative", lambda at: with_header(at, tensor("[-1]")), r"tensor"),
    Case("header-pipe", lambda at: with_pipe(at, "model.safetensors"), r"model.safetensors.* named pipe"),
    Case("header-device", lambda at: with_device(at, "model.safetensors"), r"model.safetensors.* device"),
    Case("header-offsets", lambda at: with_header(at, tensor("[1]", "[0, 1e400]")), r"model.safetensors"),
    Case("index-nested", lambda at: with_index(at, nested("[", "]", 100_000)), r"index.json: .*nested"),
    Case("index-list", lambda at: with_index(at, "[]"), r"index.json: expected"),
    Case("index-numbers", lambda at: with_index(at, '{"weight_map": {"a": 1}}'), r"index.json: expected"),
    Case("index-pairs", lambda at: with_index(at, '{"weight_map": ["ab", "cd"]}'), r"index.json: expected"),
    Case("index-null", lambda at: with_index(at, '{"weight_map": {"a": "b\\u0000c"}}'), r"index.json"),
    Case("index-pipe", lambda at: with_pipe(at, "model.safetensors.index.json"), r"index.json.* named pipe"),
    Case("index-of-a-pipe", lambda at: index_of_pipe(at), r"part.safetensors.* named pipe"),
    Case("index-large", lambda at: large_index(at), r"index.json.*expected at most"),
    Case(
        "critic",
        lambda at: at.check("", "algorithm.name=ppo", f"critic.path={at.model(config__json='[' * 5000)}"),
        r"critic.path: .*nested",
    ),
    Case(
        "import",
        lambda at: ["checkpoint", "import", at.model(config__json=nested("[", "]", 9000)), at.directory / "out"],
        r"config.json: .*nested",
    ),
]


def header(text: str | bytes, data: bytes = b"") -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + data


def tensor(shape: str, offsets: str = "[0, 4]") -> str:
    return f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}'


def with_header(at: Place, text: str | bytes) -> Sequence[object]:
    return at.check_model(at.model(model__safetensors=header(text, b"\0\0\0\0")))


def sparse_header(at: Place) -> Sequence[object]:
    model = at.model()
    at.sparse(model / "model.safetensors", 3_000_000_008, (3_000_000_000).to_bytes(8, "little") + b"{")
    return at.check_model(model)


def with_index(at: Place, text: str) -> Sequence[object]:
    return at.check_model(at.model(model__safetensors__index__json=text))


def large_index(at: Place) -> Sequence[object]:
    model = at.model()
    at.sparse(model / "model.safetensors.index.json", 3 << 30, b"{")
    return at.check_model(model)


def index_of_pipe(at: Place) -> Sequence[object]:
    model = at.model(model__safetensors__index__json='{"weight_map": {"a": "part.safetensors"}}')
    at.pipe(model / "part.safetensors")
    return at.check_model(model)
