"""Flags over environment over file over defaults; errors that name path, found and allowed."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from node import config
from node.config import Config, strict
from node.config.loading import variable_of
from node.errors import ConfigError
from protocol.identity import network_id, peer_id
from protocol.units import MINUTE_MS, price_from_hourly

EXAMPLE = Path(__file__).parents[2] / "contrib" / "gpunode.toml"
DIRECTORIES = {"state_dir": "/var/lib/x", "runtime_dir": "/run/x"}
Load = Callable[..., Config]


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    def load(toml: str, flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> Config:
        path = tmp_path / "gpunode.toml"
        path.write_text(toml)
        path.chmod(0o600)
        return config.load(flags or {}, environ or {}, path)

    return load


def test_the_defaults_make_a_configuration(load_text: Load) -> None:
    loaded = load_text("")
    assert loaded.network.name == "gpunode"
    assert loaded.network.is_open
    assert loaded.network.id == network_id("gpunode")
    assert loaded.lend.idle_after_ms == 15 * MINUTE_MS
    assert not loaded.lend.enabled
    assert loaded.ledger.pool_credit == 100 * 10**9
    assert loaded.log.json_lines is None
    with pytest.raises(AttributeError):
        loaded.network.name = "other"  # type: ignore[misc]


def test_flags_win_over_environment_over_file(load_text: Load) -> None:
    toml = '[network]\nname = "file"\n[log]\nlevel = "error"\n[metrics]\nport = 1\n'
    environ = {"GPUNODE_NETWORK_NAME": "environment", "GPUNODE_LOG_LEVEL": "warning", "PATH": "/bin"}
    loaded = load_text(toml, {"network.name": "flag", "log.level": None}, environ)
    assert (loaded.network.name, loaded.log.level, loaded.metrics.port) == ("flag", "warning", 1)


def test_words_of_the_environment_get_their_types(load_text: Load) -> None:
    environ = {
        "GPUNODE_LEND_ENABLED": "True",
        "GPUNODE_METRICS_PORT": "9400",
        "GPUNODE_TUNNEL_ADVERTISE": "gpu.example.org, 192.0.2.7",
        "GPUNODE_NETWORK_BOOTSTRAP": "",
        "GPUNODE_LEND_START_PRICE": "0.40",
        "GPUNODE_SOCKET": "/run/gpunode/rpc",
        "GPUNODE_TEST_CLOCK_OFFSET_MS": "7",
    }
    loaded = load_text("", environ=environ)
    assert loaded.lend.enabled
    assert loaded.metrics.port == 9400
    assert loaded.tunnel.advertise == ("gpu.example.org", "192.0.2.7")
    assert loaded.network.bootstrap == ()
    assert loaded.lend.start_price == price_from_hourly("0.40")


@pytest.mark.parametrize(
    ("toml", "message", "hint"),
    [
        ("[netwrok]\nname = 'x'", "there is no setting netwrok", "did you mean network?"),
        ("[lend]\nidle_aftr = '1m'", "there is no setting lend.idle_aftr", "did you mean lend.idle_after?"),
        ("idle_after = '1m'", "there is no setting idle_after", "did you mean lend.idle_after?"),
        ("[lend.terms]\nnotic = '1m'", "there is no setting lend.terms.notic", "did you mean lend.terms.notice?"),
        (
            "[lend.price.'NVIDIA T4']\nstart = 1",
            'there is no setting lend.price."NVIDIA T4".start',
            "start_price?",
        ),
        ("[[simulated_device]]\nmodell = 'x'", "there is no setting simulated_device[0].modell", "[0].model?"),
        ("zzzzzz = 1", "there is no setting zzzzzz", "known here: ledger, lend, log"),
        ("[lend]\nidle_after = 15", "lend.idle_after is 15", 'such as "15m"'),
        ("[lend]\nidle_after = '900d'", 'lend.idle_after is "900d"', "allowed: a value from 0s to 30d"),
        ("[lend]\nenabled = 'yes'", 'lend.enabled is "yes"', "allowed: true or false"),
        ("[lend]\nstart_price = 'free'", 'lend.start_price is "free"', "dollars per GPU-hour"),
        ("[lend.auction]\nlift = 1.5", "lend.auction.lift is 1.5", "allowed: a value from 0 to 1"),
        ("[lend.host]\nmemory = '64'", 'lend.host.memory is "64"', 'a size such as "512M"'),
        ("[metrics]\nport = 70000", "metrics.port is 70000", "allowed: a whole number from 0 to 65535"),
        ("[metrics]\nport = 1.0", "metrics.port is 1.0", "allowed: a whole number from 0 to 65535"),
        ("[log]\nlevel = 'loud'", 'log.level is "loud"', 'one of "debug", "error", "info", "warning"'),
        ("[network]\nname = 'Über'", 'network.name is "Über"', "1 to 64 of a-z"),
        ("[network]\nlisten = []", "network.listen is []", "1 to 8 of them"),
        ("[network]\nlisten = '/ip4/0.0.0.0/tcp/1'", "network.listen is", "allowed: a list"),
        ("[network]\nlisten = [1]", "network.listen[0] is 1", "allowed: a text"),
        ("network = 3", "network is 3", "allowed: a table"),
        ("[lend]\nprice = 3", "lend.price is 3", "allowed: a table"),
        ("[lend.price]\n'NVIDIA T4' = 1", 'lend.price."NVIDIA T4" is 1', "allowed: a table"),
        ("[lend]\nisolation = ['chroot']", 'lend.isolation[0] is "chroot"', 'one of "bubblewrap"'),
        ("state_dir = 'here'", 'state_dir is "here"', "an absolute path"),
        ("[network]\nkey = 'short'", "network.key is (not shown)", "16 to 128"),
    ],
)
def test_a_wrong_setting_says_where_what_and_what_is_allowed(
    load_text: Load, toml: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_text(toml)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[tunnel]\nport_min = 5", "tunnel: port_min 5 and port_max 0 are not a range"),
        ("[tunnel]\nport_min = 9\nport_max = 5", "are not a range"),
        ("[tunnel]\nbind = 'localhost'", "tunnel: bind is 'localhost', which is not an IP address"),
        ("[tunnel]\nadvertise = ['10.0.0.256']", "'10.0.0.256' in advertise"),
        ("[tunnel]\nadvertise = ['a b']", "'a b' in advertise"),
        ("[tunnel]\nadvertise = ['host:99']", "'host:99' in advertise"),
        ("[network]\nlisten = ['0.0.0.0:7440']", "network: '0.0.0.0:7440' in listen"),
        ("[network]\nlisten = ['/ip6/10.0.0.1/tcp/7440']", "in listen"),
        ("[network]\nlisten = ['/ip4/10.0.0.1/tcp/70000']", "in listen"),
        ("[network]\nbootstrap = ['/ip4/192.0.2.1/tcp/7440']", "in bootstrap"),
        (f"[network]\nbootstrap = ['/ip4/192.0.2.1/tcp/7440/p2p/{'1' * 52}']", "in bootstrap"),
        ("[lend]\nstart_price = 1\nreserve_price = 2", "lend: the reserve_price is above the start_price"),
        ("[lend]\nreserve_price = 2\n[lend.price.'T4']\nstart_price = 1", "the reserve_price of 'T4' is above"),
        ("[lend.price.'A']\nstart_price = 1\n[lend.price.'B']\nstart_price=1\nreserve_price=2", "lend.price.B: "),
        ("[lend]\nisolation = ['bubblewrap', 'bubblewrap']", "isolation names a tier twice"),
        ("[lend]\nisolation = ['unsafe-process']", "belong together"),
        ("[lend]\nunsafe_process = true", "belong together"),
        ("[lend]\nisolation = ['unsafe-process']\nunsafe_process = true", "refused in an open network"),
        ("[lend.terms]\nlease_min = '2h'\nlease_max = '1h'", "lend.terms: lease_min is longer than lease_max"),
        ("[[simulated_device]]\nmodel = 'A100'", "simulated_device[0].memory is missing"),
        ("[[simulated_device]]\nmodel = 'A100'\nmemory = '40G'", "allowed only in the network 'demo'"),
        ("[network]\nkey = '0123456789abcdef'\nkey_file = '/x'", "network.key and network.key_file are both set"),
        ("[network", "is not TOML"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(load_text: Load, toml: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_text(toml)


def test_misspelt_variables_and_flags_are_refused(load_text: Load) -> None:
    with pytest.raises(ConfigError, match="GPUNODE_NETWORK_NAM") as caught:
        load_text("", environ={"GPUNODE_NETWORK_NAM": "x"})
    assert caught.value.hint == "did you mean GPUNODE_NETWORK_NAME?"
    with pytest.raises(ConfigError, match=r"network\.nam") as caught:
        load_text("", {"network.nam": "x"})
    assert caught.value.hint == "did you mean network.name?"
    with pytest.raises(ConfigError, match=re.escape("metrics.port (environment GPUNODE_METRICS_PORT) is 'many'")):
        load_text("", environ={"GPUNODE_METRICS_PORT": "many"})
    with pytest.raises(ConfigError, match="metrics is 3"):
        load_text("metrics = 3", {"metrics.port": 1})


def test_a_private_pool_has_a_key_that_is_not_shown(load_text: Load, tmp_path: Path) -> None:
    loaded = load_text("[network]\nkey = 'correct horse battery'")
    assert not loaded.network.is_open
    assert loaded.network.id == network_id("gpunode", b"correct horse battery")
    assert "horse" not in repr(loaded)
    key_file = tmp_path / "key"
    key_file.write_text("correct horse battery\n")
    key_file.chmod(0o600)
    assert load_text(f"[network]\nkey_file = '{key_file}'").network.key == loaded.network.key


def test_keys_that_others_can_read_are_refused(tmp_path: Path, load_text: Load) -> None:
    path = tmp_path / "open.toml"
    path.write_text("[network]\nkey = 'correct horse battery'")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="which others can read"):
        config.load({}, {}, path)
    key_file = tmp_path / "key"
    key_file.write_text("correct horse battery")
    key_file.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        load_text(f"[network]\nkey_file = '{key_file}'")
    key_file.write_text("short")
    key_file.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no key"):
        load_text(f"[network]\nkey_file = '{key_file}'")
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_text(f"[network]\nkey_file = '{tmp_path / 'none'}'")
    with pytest.raises(ConfigError, match=r"network\.key_file is 3"):
        load_text("[network]\nkey_file = 3")


def test_an_explicit_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        config.load({}, {}, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="there is no configuration file"):
        config.load({}, {"GPUNODE_CONFIG": str(tmp_path / "none.toml")})
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        config.load({}, {}, tmp_path)


def test_the_default_file_and_directories_follow_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert config.default_path() == Path("/etc/gpunode/gpunode.toml")
    assert config.default_directories()["state_dir"] == Path("/var/lib/gpunode")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for variable in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{variable}_HOME", str(tmp_path / variable))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert config.default_path() == tmp_path / "CONFIG" / "gpunode" / "gpunode.toml"
    loaded = config.load({}, {})
    assert loaded.state_dir == tmp_path / "STATE" / "gpunode"
    assert loaded.runtime_dir == tmp_path / "run" / "gpunode"


def test_prices_of_a_model_win_over_the_general_ones(load_text: Load) -> None:
    loaded = load_text(
        "[lend]\nstart_price = 2\nreserve_price = '0.5'\n[lend.price.'NVIDIA A100-SXM4-80GB']\nreserve_price = 1\n"
    )
    two, half, one = price_from_hourly("2"), price_from_hourly("0.5"), price_from_hourly("1")
    assert loaded.lend.prices_of("NVIDIA A100-SXM4-80GB") == (two, one)
    assert loaded.lend.prices_of("Tesla T4") == (two, half)


def test_the_cost_model_takes_the_devices_power_unless_set(load_text: Load) -> None:
    costs = load_text("[lend.cost]\npue = 1.5\ntariff = '0.30'\ndepreciation = 0.18").lend.cost.model(400)
    assert (costs.power_w, costs.pue_permille, costs.tariff_per_kwh) == (400, 1500, 300_000_000)
    assert costs.depreciation == 180_000_000
    assert load_text("[lend.cost]\npower_w = 250").lend.cost.model(400).power_w == 250


def test_simulated_devices_live_in_the_demo_network(load_text: Load) -> None:
    toml = "[network]\nname = 'demo'\n[[simulated_device]]\nmodel = 'NVIDIA A100'\nmemory = '80G'\ncount = {}\n"
    (table,) = load_text(toml.format(2)).simulated_devices
    assert (table.memory_mib, table.count, table.compute_capability, table.cuda) == (81_920, 2, 80, 12040)
    with pytest.raises(ConfigError, match="more than 64 simulated devices"):
        load_text(toml.format(60) + toml.format(60).partition("'demo'\n")[2])


def test_bootstrap_takes_a_real_peer_id(load_text: Load) -> None:
    address = f"/dns4/gpu.example.org/tcp/7440/p2p/{peer_id(bytes(32))}"
    assert load_text(f"[network]\nbootstrap = ['{address}']").network.bootstrap == (address,)


def test_unsafe_process_is_possible_in_a_private_pool(load_text: Load) -> None:
    toml = "[network]\nkey = '0123456789abcdef'\n[lend]\nisolation = ['unsafe-process']\nunsafe_process = true"
    assert load_text(toml).lend.isolation == ("unsafe-process",)


def _uncommented(text: str) -> str:
    """Return the example with its settings in force, but for what can't stand together with the defaults."""
    lines = []
    for line in text.splitlines():
        setting = re.fullmatch(r"# ((?:[a-z_]+ = .*)|(?:\[.*\]))", line)
        lines.append(setting[1] if setting else line)
    return "\n".join(lines)


def test_the_example_names_every_setting_with_its_default(load_text: Load) -> None:
    example = EXAMPLE.read_text()
    assert load_text(example, DIRECTORIES) == load_text("", DIRECTORIES)
    uncommented = _uncommented(example).replace('name = "gpunode"', 'name = "demo"')
    uncommented = uncommented.replace('key_file = "/etc/gpunode/network.key"\n', "")
    loaded = load_text(uncommented, DIRECTORIES)
    written = set(re.findall(r"^([a-z_]+) = ", uncommented, re.MULTILINE)) | {"key_file"}
    assert {leaf.path[-1] for leaf in strict.leaves()} <= written
    # Settings without a default show an example; all others show the default.
    shown = msgspec.structs.asdict(loaded.lend) | {"start_price": None, "reserve_price": None, "price": {}}
    shown["cost"] = msgspec.structs.replace(loaded.lend.cost, power_w=None)
    shown["host"] = config.HostShare()
    assert config.LendSettings(**shown) == config.LendSettings()
    assert loaded.simulated_devices[0].memory_mib == 81_920
    plain = msgspec.structs.replace(loaded.network, name="gpunode", key=None)
    assert plain == config.NetworkSettings()
    for section in ("log", "tunnel", "ledger", "metrics"):
        assert getattr(loaded, section) == getattr(load_text("", DIRECTORIES), section)


def test_shown_configuration_reads_back_and_names_origins(load_text: Load, tmp_path: Path) -> None:
    path = tmp_path / "source.toml"
    path.write_text(
        _uncommented(EXAMPLE.read_text())
        .replace('name = "gpunode"', 'name = "demo"')
        .replace('key = "correct horse battery staple"\n', "")
        .replace('key_file = "/etc/gpunode/network.key"\n', "")
    )
    loaded = config.load_with_origins(
        {**DIRECTORIES, "network.max_peers": 9}, {"GPUNODE_LEND_SITE": 'a "site"'}, path
    )
    shown = config.as_toml(loaded)
    assert load_text(shown) == loaded.config
    assert "max_peers = 9  # flag" in shown
    assert r'site = "a \"site\""  # environment GPUNODE_LEND_SITE' in shown
    assert f'level = "info"  # file {path}' in shown
    defaults = config.load_with_origins(DIRECTORIES, {}, Path("/dev/null"))
    assert load_text(config.as_toml(defaults)) == defaults.config


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("correct horse battery\n")
    key_file.chmod(0o600)
    flags = {"network.key_file": key_file}
    for loaded in (
        config.load_with_origins(flags, {}, Path("/dev/null")),
        config.load_with_origins({}, {"GPUNODE_NETWORK_KEY": "correct horse battery"}, Path("/dev/null")),
    ):
        assert "horse" not in config.as_toml(loaded) + repr(config.explain(loaded)) + repr(loaded)
        assert "key is set, and not shown" in config.as_toml(loaded)
        assert loaded.origins["network.key"] != "default"


def test_explain_lists_every_setting_once() -> None:
    loaded = config.load_with_origins({"log.level": "debug"}, {}, Path("/dev/null"))
    rows = {row["name"]: row for row in config.explain(loaded)}
    assert rows["log.level"] == {
        "name": "log.level",
        "value": '"debug"',
        "origin": "flag",
        "variable": "GPUNODE_LOG_LEVEL",
        "allowed": 'one of "debug", "error", "info", "warning"',
    }
    variables = [variable_of(leaf) for leaf in strict.leaves()]
    assert len(set(variables)) == len(variables) == len(rows)
