"""From what a user wrote, and ``~/.ssh/config``, to the machine that is meant."""

from __future__ import annotations

import base64
import getpass
import hashlib
import hmac
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_batchai.engines.shell import host_keys
from mlflow_batchai.engines.shell.target import Target, resolve
from mlflow_batchai.errors import ClusterError

ME = getpass.getuser()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user without ~/.ssh/config."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("BATCHAI_SSH_PASSWORD", raising=False)
    monkeypatch.delenv("BATCHAI_SSH_PASSPHRASE", raising=False)
    return folder


@pytest.fixture
def config(home):
    """Writes ~/.ssh/config."""

    def write(text: str, name: str = "config") -> Path:
        file = home / ".ssh" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu1", f"{ME}@gpu1:22"),
        ("ann@gpu1", "ann@gpu1:22"),
        ("gpu1:2222", f"{ME}@gpu1:2222"),
        ("ann@gpu1:2222", "ann@gpu1:2222"),
        ("ann@example.com@gpu1", "ann@example.com@gpu1:22"),
        ("10.0.0.4", f"{ME}@10.0.0.4:22"),
        ("::1", f"{ME}@[::1]:22"),
        ("fe80::1%eth0", f"{ME}@[fe80::1%eth0]:22"),
        ("[::1]", f"{ME}@[::1]:22"),
        ("ann@[2001:db8::7]:2222", "ann@[2001:db8::7]:2222"),
    ],
)
def test_addresses(text, address):
    target = resolve(text)
    assert (target.name, target.address, target.timeout) == (text, address, 10.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not an address; write name, user@name"),
        ("@gpu1", "is not an address"),
        ("gpu1:", "the port must be a number from 1 to 65535"),
        ("gpu1:ssh", "the port must be a number"),
        ("gpu1:70000", "the port must be a number"),
        ("[::1]:0", "the port must be a number"),
        ("-oProxyCommand=evil", "can't be a name there"),
        ("gpu1;reboot", "can't be a name there"),
        ("$(reboot)@gpu1", "can't be a name there"),
        ("[::1", "can't be a name there"),
    ],
)
def test_what_is_no_address(text, problem):
    with pytest.raises(ClusterError) as caught:
        resolve(text)
    assert str(caught.value).startswith(f"node address {text!r}") and problem in str(caught.value)


def test_the_config_is_honoured(config, home):
    config("""
        Host gpu*
            HostName 10.0.0.4
            Port 2222
            User ann
            IdentityFile ~/.ssh/one
            IdentityFile %d/two
            IdentitiesOnly yes
            UserKnownHostsFile ~/known "/tmp/with blank"
            HostKeyAlias the-gpu
            ConnectTimeout 3
            StrictHostKeyChecking no
        Host *
            User everybody
    """)
    target = resolve("gpu1")
    assert (target.name, target.address, target.timeout) == ("gpu1", "ann@10.0.0.4:2222", 3)
    assert target.key_files == (home / ".ssh" / "one", home / "two") and target.identities_only
    assert target.known_hosts[:2] == (home / "known", Path("/tmp/with blank"))
    assert target.host_key_name == "the-gpu"
    assert resolve("other").user == "everybody"


def test_what_is_written_nearer_wins(config, tmp_path):
    config("Host *\n User c\n Port 3\n IdentityFile c\n UserKnownHostsFile c\n ConnectTimeout 3\n")
    target = resolve("a@n:1", user="b", port=2, key_file="~/b", known_hosts=tmp_path / "b", timeout=2)
    assert (target.user, target.port, target.timeout) == ("a", 1, 2)
    assert target.key_files == (Path.home() / "b",) and target.explicit_keys
    assert target.known_hosts == (tmp_path / "b",)
    target = resolve("n", user="b", port=2)
    assert (target.user, target.port) == ("b", 2)


def test_files_are_included(config):
    config("Host outer\n Include more/*.conf\n User outer\nHost *\n Port 7\n")
    config("User inner\nHost gpu\n Port 5\n", "more/a.conf")
    assert (resolve("gpu").port, resolve("outer").port, resolve("outer").user) == (5, 7, "inner")


def test_jump_hosts_chain(config):
    config("""
        Host gpu
            ProxyJump first@one:1,two
        Host two
            User second
            ProxyJump never
        Host one
            ProxyJump zero
    """)
    target = resolve("gpu", key_file="/k", known_hosts="/h", password="for the node")
    assert target.jump and target.jump.jump and target.jump.jump.jump
    assert [target.jump.address, target.jump.jump.address] == ["second@two:22", "first@one:1"]
    assert (target.jump.jump.jump.name, target.jump.jump.jump.jump) == ("zero", None)
    assert target.jump.key_files == (Path("/k"),) and target.jump.known_hosts == (Path("/h"),)
    assert target.jump.password is None
    assert resolve("gpu", jump="none").jump is None
    other = resolve("gpu", jump="ann@[::1]:4")
    assert other.jump and other.jump.address == "ann@[::1]:4"


def test_a_jump_host_does_not_jump_through_itself(config):
    config("Host *\n ProxyJump bastion\n")
    target = resolve("gpu")
    assert target.jump and target.jump.name == "bastion" and target.jump.jump is None


def test_a_circle_of_jump_hosts(config):
    config("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(ClusterError, match=r"more than 8 jump hosts; look for a circle of ProxyJump in .*config"):
        resolve("a")


def test_a_proxy_command(config):
    config("Host gpu\n HostName 10.0.0.4\n ProxyCommand nc %h %p 2>/dev/null\nHost plain\n ProxyCommand none\n")
    assert resolve("gpu", port=5).proxy_command is not None
    assert resolve("gpu").proxy_command == "nc 10.0.0.4 22 2>/dev/null"
    assert resolve("gpu", jump="none").proxy_command is None and resolve("gpu", jump="b").proxy_command is None
    assert resolve("plain").proxy_command is None


@pytest.mark.parametrize("text", ["Port twenty\n", "Host\n", "Host 'a\n", "nonsense\n", "ConnectTimeout x\n", 'Include "a\n'])
def test_a_broken_config_is_named(config, text):
    file = config(text)
    with pytest.raises(ClusterError) as caught:
        resolve("gpu")
    assert str(caught.value).startswith(str(file))


def test_secrets_come_from_the_environment_and_are_never_shown(monkeypatch):
    monkeypatch.setenv("BATCHAI_SSH_PASSWORD", "open-sesame")
    monkeypatch.setenv("BATCHAI_SSH_PASSPHRASE", "swordfish")
    target = resolve("gpu", jump="bastion")
    assert (target.password, target.passphrase) == ("open-sesame", "swordfish")
    assert resolve("gpu", password="mine").password == "mine"
    assert (
        "sesame" not in repr(target) and "swordfish" not in repr(target) and "mine" not in repr(resolve("gpu", password="mine"))
    )


# Public keys of nobody's.
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIMx4oMfZ5exfwwX5T8oiod2I64VYMDIi5XA/FOxSoeBo"
OTHER = "AAAAC3NzaC1lZDI1NTE5AAAAIPpuYtVvaTZ77yKSgW8W/MjwJaPtx6ChpC7yYoVpvjNX"


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def known(tmp_path: Path, port: int = 22) -> list[tuple[int, str, bool]]:
    target = Target("gpu", "gpu", port, "me", known_hosts=(tmp_path / "absent", tmp_path / "known"))
    return [(entry.line, entry.key.get_base64(), entry.revoked) for entry in host_keys.find(target)]


@pytest.mark.parametrize(
    "names",
    ["gpu", "other,gpu", "g?u", "*", "GPU", "!other,g*", hashed("gpu"), "@cert-authority x y z\ngpu", "gpu ssh-rsa %%%\ngpu"],
)
def test_known_names(tmp_path, names):
    (tmp_path / "known").write_text(f"# comment\n\n{names}  ssh-ed25519\t{KEY} of somebody\n")
    assert [key for _, key, _ in known(tmp_path)] == [KEY]


@pytest.mark.parametrize(
    "names",
    [
        *("gp", "gpu2", "!gpu,*", "[gpu]:2222", hashed("other"), "|1|x", "#gpu", "#old,gpu"),
        *("@revoked #old,gpu", "@cert-authority gpu", "@cert-authority #old,gpu", "@unknown,gpu"),
    ],
)
def test_other_names(tmp_path, names):
    (tmp_path / "known").write_text(f"{names} ssh-ed25519 {KEY}\n")
    assert known(tmp_path) == []


def test_names_with_a_port_and_revoked_keys(tmp_path):
    lines = f"[gpu]:2222 ssh-ed25519 {KEY}\n@revoked [gpu]:2222 ssh-ed25519 {OTHER}\ngpu ssh-ed25519 {OTHER}\n"
    (tmp_path / "known").write_text(lines)
    assert known(tmp_path, 2222) == [(1, KEY, False), (2, OTHER, True)]
    # Like ssh: a key that is known for the machine's port 22 will do.
    assert known(tmp_path, 2223) == [(3, OTHER, False)]


@pytest.mark.parametrize("module", ["connection", "target"])
def test_importing_brings_no_paramiko(module):
    code = (
        f"import mlflow_batchai.engines.shell.{module}, sys; sys.exit(bool({{'paramiko', 'cryptography'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
