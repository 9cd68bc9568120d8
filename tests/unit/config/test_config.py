"""Settings: what is accepted, from where, and how a wrong one is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vllm_delta_sync import config
from vllm_delta_sync.config import stores
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.store import open_store

CONFIGS = Path(__file__).parents[3] / "configs"
STORE = {"store": "file:///mnt/bucket"}


def _refused(settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config.parse(settings, "here.yaml")
    assert str(caught.value).startswith("here.yaml: ")
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_every_shipped_config_loads_as_vllm_would_hand_it_over(path: Path) -> None:
    options = yaml.safe_load(path.read_text())
    assert options["worker-extension-cls"] == "vllm_delta_sync.WorkerExtension"
    assert config.load(options["additional-config"], environ={}).store.uri.partition("://")[0] in stores.MODELS


def test_an_example_of_each_shared_kind_of_store_is_shipped() -> None:
    shown = [yaml.safe_load(path.read_text())["additional-config"] for path in CONFIGS.iterdir()]
    assert {config.load(options, environ={}).store.kind for options in shown} >= {"file", "hf", "s3"}


def test_the_complete_example_shows_every_setting_at_its_default() -> None:
    shown = yaml.safe_load((CONFIGS / "serve.yaml").read_text())["additional-config"]["delta_sync"]
    assert set(shown) == set(config.DeltaSyncConfig.model_fields)
    assert config.parse(shown, "serve.yaml") == config.parse({"store": shown["store"]}, "defaults")


def test_every_setting_has_a_docstring() -> None:
    for model in (config.DeltaSyncConfig, *stores.MODELS.values()):
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_a_store_uri_is_the_same_as_its_mapping() -> None:
    by_uri = config.parse(STORE, "a")
    assert by_uri == config.parse({"store": {"kind": "file", "path": "/mnt/bucket"}}, "b")
    assert by_uri.store.uri == "file:///mnt/bucket"


def test_a_store_may_be_an_absolute_path() -> None:
    assert config.parse({"store": "/mnt/bucket"}, "a") == config.parse(STORE, "b")


def test_a_store_path_with_unusual_letters_survives_the_way_through_its_uri() -> None:
    store = config.parse({"store": "/mnt/my bucket/50 %/ä"}, "a").store
    assert config.parse({"store": store.uri}, "b").store == store
    assert open_store(store.uri).uri == store.uri


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("mnt/bucket", "must be absolute"),
        ("file://mnt/bucket", "file:///mnt/bucket"),
        ("ftp://host/bucket", "file://"),
        ("s4://host/bucket", "did you mean 's3'?"),
        ("s3://", "s3://bucket[/prefix]"),
        ("s3://bucket/a b", "prefix"),
        ("s3://bucket/../a", "prefix"),
        ("s3://bucket?endpoint_url=http://x", "no query"),
        ("hf://me/name", "hf://buckets/namespace/name"),
        ("hf://buckets/me", "hf://buckets/namespace/name"),
        ("memory://name", "no server can follow it"),
    ],
)
def test_a_store_uri_that_no_server_can_follow_is_refused_with_advice(uri: str, advice: str) -> None:
    assert advice in _refused({"store": uri})


@pytest.mark.parametrize(
    ("uri", "settings"),
    [
        ("hf://buckets/me/my.bucket", {"kind": "hf", "bucket": "me/my.bucket"}),
        ("hf://buckets/me/b/runs/42", {"kind": "hf", "bucket": "me/b", "prefix": "runs/42"}),
        ("s3://bucket", {"kind": "s3", "bucket": "bucket"}),
        ("s3://bucket/runs/42", {"kind": "s3", "bucket": "bucket", "prefix": "runs/42"}),
        ("gs://bucket/runs", {"kind": "gs", "bucket": "bucket", "prefix": "runs"}),
        ("az://container/runs", {"kind": "az", "container": "container", "prefix": "runs"}),
    ],
)
def test_a_uri_and_its_mapping_are_the_same_store_to_trainer_and_server(uri: str, settings: dict[str, str]) -> None:
    store = config.parse({"store": uri}, "a").store
    assert store == config.parse({"store": settings}, "b").store == config.store_from_uri(uri)
    assert store.uri == uri
    assert config.store_from_uri(uri + "/") == store


def test_every_kind_is_the_scheme_of_its_uri_and_has_an_example_that_opens_it() -> None:
    assert set(stores.EXAMPLES) == set(stores.MODELS)
    for kind, example in stores.EXAMPLES.items():
        opened = config.store_from_uri(example.replace("[", "").replace("]", ""))
        assert (type(opened), opened.kind) == (stores.MODELS[kind], kind)
        assert opened.uri.startswith(f"{kind}://")


@pytest.mark.parametrize(
    "uri", ["s3://b", "gs://Upper", "az://x", "memory://", "hf://buckets/a b/c", "s3://u:pw@host/b"]
)
def test_a_uri_that_its_store_cannot_mean_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=uri.partition(":")[0]):
        config.store_from_uri(uri)


@pytest.mark.parametrize("key", ["secret_access_key", "token", "account_key", "password"])
def test_a_secret_in_the_settings_is_refused_and_never_repeated(key: str) -> None:
    message = _refused({"store": {"kind": "s3", "bucket": "bucket", key: "hunter2"}})
    assert key in message and "environment" in message and "hunter2" not in message


@pytest.mark.parametrize(
    "settings",
    [
        {"store": {"kind": "s3", "bucket": "bucket", "api_key": "hunter2"}},
        {"store": {"kind": "s3", "bucket": "bucket", "storage_options": {"key": "hunter2"}}},
        {"store": {"kind": "s3", "bucket": "bucket", "endpoint_url": "https://host/?signature=hunter2"}},
        {"store": {"kind": "s3", "bucket": "bucket", "prefix": ["hunter2"]}},
        {"store": ["s3://me:hunter2@bucket"]},
        {"store": "https://me:hunter2@host/bucket"},
        {"stor": "s3://me:hunter2@bucket"},
        "s3://me:hunter2@bucket",
    ],
)
def test_what_may_be_a_secret_in_the_wrong_place_is_never_repeated(settings: object) -> None:
    assert "hunter2" not in _refused(settings)


@pytest.mark.parametrize("url", ["http://me:hunter2@host", "ftp://host", "host:9000", "http://"])
def test_an_endpoint_is_a_plain_http_address(url: str) -> None:
    message = _refused({"store": {"kind": "s3", "bucket": "bucket", "endpoint_url": url}})
    assert "store.endpoint_url" in message and "hunter2" not in message


def test_an_unknown_key_of_a_store_is_compared_with_those_of_its_kind() -> None:
    message = _refused({"store": {"kind": "s3", "bucket": "bucket", "endpoint": "http://x"}})
    assert "'store.endpoint'" in message and "did you mean 'endpoint_url'?" in message and "'path'" not in message


def test_a_store_without_a_kind_is_told_the_kinds() -> None:
    assert "'store.kind' is missing: one of file, hf, s3, gs, az" in _refused({"store": {"path": "/mnt/bucket"}})


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({"store": "s3://bucket"}, "/caches/vllm-delta-sync"),
        ({"store": "s3://bucket", "cache_dir": "/fast/disk"}, "/fast/disk"),
        ({"store": "s3://bucket", "cache_dir": "/fast/disk", "cache_bytes": 0}, None),
        ({"store": "/mnt/bucket"}, None),
        ({"store": "/mnt/bucket", "cache_dir": "/fast/disk"}, "/fast/disk"),
    ],
)
def test_the_cache_is_where_it_is_set_or_in_the_users_folder(settings: dict[str, object], folder: str | None) -> None:
    found = config.parse(settings, "a").cache_folder({"XDG_CACHE_HOME": "/caches"})
    assert found == (None if folder is None else Path(folder))


def test_a_relative_path_is_refused() -> None:
    assert "store.path: 'bucket'" in _refused({"store": {"kind": "file", "path": "bucket"}})
    assert "cache_dir" in _refused({**STORE, "cache_dir": "cache"})


def test_an_unknown_key_is_refused_and_the_nearest_key_named() -> None:
    message = _refused({**STORE, "pol_interval": 3})
    assert "'pol_interval' (value 3)" in message and "did you mean 'poll_interval_s'?" in message


def test_an_unknown_key_of_the_store_is_refused_and_the_nearest_key_named() -> None:
    message = _refused({"store": {"kind": "file", "paht": "/x", "path": "/x"}})
    assert "'store.paht'" in message and "did you mean 'path'?" in message


def test_a_wrong_choice_is_refused_and_the_nearest_choice_named() -> None:
    message = _refused({**STORE, "kv_cache": "reset-prefix"})
    assert "kv_cache: 'reset-prefix'" in message and "did you mean 'reset_prefix'?" in message


def test_a_wrong_store_kind_is_refused_with_the_kinds_that_exist() -> None:
    message = _refused({"store": {"kind": "S3", "bucket": "bucket"}})
    assert "store.kind: 'S3' is not one of file, hf, s3, gs, az, did you mean 's3'?" in message
    assert "is not one of" in _refused({"store": {"kind": "memory", "name": "x"}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("poll_interval_s", 0.01),
        ("poll_interval_s", "fast"),
        ("poll_interval_s", float("nan")),
        ("commit_timeout_s", 0),
        ("catch_up_timeout_s", float("inf")),
        ("threads", 0),
        ("threads", True),
        ("audit_every", -1),
        ("store_timeout_s", 0.5),
        ("cache_bytes", -1),
        ("run", "../../etc"),
        ("run", "ABCDEF0123456789ABCDEF0123456789"),
    ],
)
def test_a_value_out_of_range_is_refused_by_key_and_value(key: str, value: object) -> None:
    assert f"{key}: {value!r}" in _refused({**STORE, key: value})


def test_all_wrong_settings_are_reported_at_once() -> None:
    message = _refused({**STORE, "threads": 0, "audit_every": -1})
    assert "threads" in message and "audit_every" in message


def test_a_missing_store_is_refused_with_an_example() -> None:
    assert "'store' is missing" in _refused({"threads": 2})


@pytest.mark.parametrize("settings", [None, [], "file:///mnt/bucket", 3])
def test_settings_that_are_no_mapping_are_refused_with_an_example(settings: object) -> None:
    assert "additional-config:" in _refused(settings)


def test_a_config_cannot_be_changed() -> None:
    settings = config.parse(STORE, "a")
    with pytest.raises(ValueError, match="frozen"):
        settings.threads = 4  # type: ignore[misc]


@pytest.mark.parametrize("text", ["delta_sync:\n  store: file:///b\n  threads: 3\n", "store: file:///b\nthreads: 3\n"])
def test_the_environment_may_name_a_file_with_or_without_the_section(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sync.yaml"
    file.write_text(text)
    assert config.load({}, environ={config.CONFIG_ENV: str(file)}).threads == 3


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sync.yaml"
    file.write_text("store: file:///b\nthread: 3\n")
    with pytest.raises(ConfigError, match=r"sync\.yaml: unknown key 'thread'.*did you mean 'threads'"):
        config.load(None, environ={config.CONFIG_ENV: str(file)})


def test_a_file_that_is_missing_or_no_yaml_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        config.load_file(tmp_path / "absent.yaml")
    for text in ("store: [", "run: 2024-99-99", "[" * 3000):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.yaml: is not YAML"):
            config.load_file(tmp_path / "bad.yaml")


def test_settings_given_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        config.load({"delta_sync": STORE}, environ={config.CONFIG_ENV: str(tmp_path / "sync.yaml")})


@pytest.mark.parametrize("additional_config", [None, {}, {"other_plugin": {}}, object()])
def test_no_settings_at_all_are_refused_with_what_to_write(additional_config: object) -> None:
    with pytest.raises(ConfigError, match="additional-config:") as caught:
        config.load(additional_config, environ={})
    assert config.CONFIG_ENV in str(caught.value)
