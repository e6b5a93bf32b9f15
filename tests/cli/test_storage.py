"""``batchai storage``: the same commands on an Azure account (the emulator) and on a directory that stands for one."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer
from command_line import Cli

from mlflow_batchai.cli.storage import progress
from mlflow_batchai.storage import credentials

NASTY = "a%20b#c%2Fd+e&f=g quo'te`s hé 世界 $HOME;~{}[].h5"


class Account:
    """A storage account, its commands, and the folders in which its shares really lie."""

    def __init__(self, cli: Cli, root: Path, name: str, kind: str) -> None:
        self.cli = cli
        self.root = root
        self.name = name
        self.kind = kind

    def __call__(self, *arguments: str | Path) -> Any:
        return self.cli("storage", *arguments, "--account-name", self.name)

    def json(self, *arguments: str | Path) -> Any:
        return self.cli.json("storage", *arguments, "--account-name", self.name)

    def share(self, name: str = "data") -> Path:
        self.json("share", "create", "-n", name)
        return self.root / name


@pytest.fixture(params=["directory", "azure"])
def account(request: pytest.FixtureRequest, cli: Cli) -> Iterator[Account]:
    """An account without shares."""
    cli.world.environment = {
        name: value for name, value in cli.world.environment.items() if not name.startswith("AZURE_STORAGE")
    }
    if request.param == "directory":
        yield Account(cli, cli.world.home / "shares" / "mine", "mine", "directory")
        return
    azure: AzureServer = request.getfixturevalue("azure")
    configure(cli, azure)
    made = Account(cli, azure.root / "file", azure.account, "azure")
    yield made
    for entry in made.json("share", "list"):
        made.json("share", "delete", "-n", entry["name"], "-y")


def configure(cli: Cli, azure: AzureServer, key: str | None = None) -> None:
    cli.world.home.mkdir(exist_ok=True)
    entry = {"accountKey": key or azure.key, "fileEndpoint": azure.endpoint}
    (cli.world.home / "config.yaml").write_text(json.dumps({"shares": {azure.account: entry}}))


def test_shares_are_made_listed_and_deleted(account: Account) -> None:
    assert account.json("share", "list") == []
    assert account.json("share", "create", "-n", "photos", "--quota", "7") == {"created": True}
    assert account.json("share", "create", "data") == {"created": True}
    assert account.json("share", "create", "data") == {"created": False}
    found = account.json("share", "list")
    assert [entry["name"] for entry in found] == ["data", "photos"]
    assert [entry["properties"]["quota"] for entry in found] == ([None, None] if account.kind == "directory" else [5120, 7])
    assert {entry["properties"]["lastModified"][-6:] for entry in found} == {"+00:00"}
    table = account("share", "list", "-o", "table").out.splitlines()
    assert table[0].split("  ")[0] == "Name" and table[0].endswith("Last Modified")
    assert table[2].split()[0] == "data"
    (account.root / "photos" / "x").write_bytes(b"1")
    assert account.json("share", "delete", "-n", "photos", "-y") == {"deleted": True}
    assert not (account.root / "photos").exists()
    assert [entry["name"] for entry in account.json("share", "list")] == ["data"]


def test_a_file_goes_there_and_back(account: Account, tmp_path: Path) -> None:
    account.share()
    source = tmp_path / NASTY
    data = os.urandom(9_000_001)
    source.write_bytes(data)
    made = account.json("file", "upload", "-s", "data", "--source", source, "-p", f"models/{NASTY}/")
    assert (made["name"], made["type"], made["properties"]["contentLength"]) == (NASTY, "file", len(data))
    assert made["properties"]["lastModified"].endswith("+00:00")
    assert (account.root / "data" / "models" / NASTY / NASTY).read_bytes() == data
    path = f"/models/{NASTY}/{NASTY}"
    assert account.json("file", "download", "-s", "data", "-p", path, "--dest", tmp_path / "got" / "it.h5") == made
    assert (tmp_path / "got" / "it.h5").read_bytes() == data
    assert [path.name for path in (tmp_path / "got").iterdir()] == ["it.h5"]
    account.json("file", "download", "-s", "data", "-p", path)
    assert (account.cli.world.cwd / NASTY).read_bytes() == data
    assert account.json("file", "delete", "-s", "data", "-p", path, "-y") == {"deleted": True}
    assert account.json("file", "list", "-s", "data", "-p", f"models/{NASTY}") == []


def test_directories_and_their_listings(account: Account, tmp_path: Path) -> None:
    account.share()
    assert account.json("directory", "create", "-s", "data", "-n", "hvd/in") == {"created": True}
    assert account.json("directory", "create", "-s", "data", "-n", "hvd/in") == {"created": False}
    (tmp_path / "train.py").write_text("print()\n")
    account.json("file", "upload", "-s", "data", "--source", tmp_path / "train.py", "-p", "hvd")
    found = account.json("file", "list", "-s", "data", "--path", "hvd")
    assert [(entry["name"], entry["type"], entry["properties"]["contentLength"]) for entry in found] == [
        ("in", "dir", None),
        ("train.py", "file", 8),
    ]
    assert [entry["name"] for entry in account.json("file", "list", "-s", "data")] == ["hvd"]
    table = account("file", "list", "-s", "data", "-p", "hvd", "-o", "table").out.splitlines()
    assert table[0].split() == ["Name", "Content", "Length", "Type", "Last", "Modified"]
    assert table[3].split()[:3] == ["train.py", "8", "file"]


@pytest.mark.parametrize(
    ("there", "path", "goes"),
    [
        ("", "", "train.py"),
        ("", "new.py", "new.py"),
        ("", "new/", "new/train.py"),
        ("", "new/LICENSE", "new/LICENSE"),
        ("v1.0/", "v1.0", "v1.0/train.py"),
        ("LICENSE", "LICENSE", "LICENSE"),
        ("train.py", "", "train.py"),
    ],
)
def test_where_an_upload_goes(account: Account, tmp_path: Path, there: str, path: str, goes: str) -> None:
    folder = account.share()
    if there.endswith("/"):
        (folder / there).mkdir()
    elif there:
        (folder / there).write_text("what was there")
    (tmp_path / "train.py").write_text("code")
    account.json("file", "upload", "-s", "data", "--source", tmp_path / "train.py", "-p", path)
    assert (folder / goes).read_text() == "code"


def test_where_a_download_goes(account: Account, tmp_path: Path) -> None:
    (account.share() / "x").write_text("new")
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").write_text("what was there, longer")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    for dest, goes in (("folder", "folder/x"), ("link", "old"), ("made/", "made/x")):
        account.json("file", "download", "-s", "data", "-p", "x", "--dest", f"{tmp_path}/{dest}")
        assert (tmp_path / goes).read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    said = account("file", "download", "-s", "data", "-p", "x", "--dest", "/dev/null")
    assert (said.code, Path("/dev/null").is_file()) == (2, False)
    assert "--dest: '/dev/null' is there already, and is no file" in said.err
    (tmp_path / "file").write_text("")
    said = account("file", "download", "-s", "data", "-p", "x", "--dest", tmp_path / "file" / "x")
    assert said.code == 1 and f"'{tmp_path}/file/x'" in said.err


def test_what_isnt_there_is_exit_3_with_what_is(account: Account, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1")
    said = account("file", "list", "-s", "data")
    assert said.code == 3
    assert f"there is no file share 'data' in the storage account '{account.name}'; it has none" in said.err
    folder = account.share("photos")
    (folder / "a").mkdir()
    (folder / "a" / "known.h5").write_text("1")
    for number in range(30):
        (folder / f"{number:02}").touch()
    for arguments in (
        ("file", "list", "-s", "data"),
        ("file", "upload", "-s", "data", "--source", tmp_path / "x"),
        ("share", "delete", "-n", "../photos", "-y"),
    ):
        said = account(*arguments)
        assert (said.code, said.out) == (3, ""), said
        assert f"in the storage account '{account.name}'; its shares are: photos" in said.err
    for arguments, words in (
        (("file", "download", "-p", "a/x"), "'a' has: known.h5"),
        (("file", "delete", "-p", "x", "-y"), "its root has: 00, 01, "),
        (("file", "delete", "-p", "x", "-y"), "17, 18, 19, and 11 more\n"),
        (("file", "list", "-p", "a/known.h5/x"), "'a/known.h5' is a file"),
        (("file", "download", "-p", "b/c/d"), "there is no 'b' on the file share"),
    ):
        said = account(*arguments, "-s", "photos")
        assert (said.code, said.out) == (3, ""), said
        assert words in said.err
    assert (folder / "a" / "known.h5").exists()


def test_what_cant_be_used(account: Account, tmp_path: Path) -> None:
    folder = account.share()
    (folder / "a").mkdir()
    (folder / "x").write_text("1")
    (tmp_path / "x").write_text("1")
    os.mkfifo(tmp_path / "pipe")
    upload = ("file", "upload", "-s", "data", "--source")
    for arguments, words in (
        ((*upload, tmp_path), "is no file of this machine; files are uploaded one at a time"),
        ((*upload, tmp_path / "none"), "none' is no file of this machine"),
        ((*upload, tmp_path / "pipe"), "is no file"),
        ((*upload, tmp_path / ("n" * 300)), "nn' can't be read: File name too long\n"),
        ((*upload, tmp_path / "x" / "y"), "y' is no file of this machine"),
        ((*upload, "/proc/self/mem", "-p", "y"), "batchai: --source: '/proc/self/mem' can't be read: Input/output error\n"),
        ((*upload, tmp_path / "x", "-p", "../x"), "'../x' is no path on a file share"),
        ((*upload, tmp_path / "x", "-p", "a/.new-x"), "can't be a path on a file share"),
        (("directory", "create", "-s", "data", "-n", "a/../.."), "is no path on a file share"),
        (("directory", "create", "-s", "data", "-n", "/"), "the name of the directory is empty"),
        (("file", "download", "-s", "data", "-p", "a"), "'a' is a directory, not a file"),
        (("file", "download", "-s", "data", "-p", "/"), "--path names no file"),
        (("file", "delete", "-s", "data", "-p", "a", "-y"), "'a' is a directory, not a file"),
        (("file", "list", "-s", "data", "-p", "x"), "'x' is a file, not a directory"),
        (("share", "create", "-n", "Under_Score"), "no file share can be called 'Under_Score'"),
        (("share", "create", "-n", "a"), "it takes 3 to 63 small letters"),
        (("share", "create", "-n", "good", "--quota", "0"), "0 is not in the range"),
    ):
        said = account(*arguments)
        assert (said.code, said.out) == (2, ""), said
        assert words in said.err
    said = account("directory", "create", "-s", "data", "-n", "x")
    assert said.code == 1 and "there is a file 'x' on the file share" in said.err
    assert sorted(path.name for path in folder.rglob("*")) == ["a", "x"]


def test_deletes_need_a_yes(account: Account) -> None:
    (account.share() / "x").write_text("1")
    for arguments in (("share", "delete", "-n", "data"), ("file", "delete", "-s", "data", "-p", "x")):
        said = account(*arguments)
        assert said.code == 2 and "needs -y where there is no terminal" in said.err
    assert (account.root / "data" / "x").exists()


def test_a_person_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with progress("data/x", 1000) as tell:
        tell(500)
        tell(500)
    assert "data/x" in shown.getvalue() and "100%" in shown.getvalue()


# Which account, and what it means.


def test_one_notice_tells_of_a_directory(cli: Cli) -> None:
    said = cli("storage", "share", "create", "-n", "data", "--quota", "7", AZURE_STORAGE_ACCOUNT="Mine")
    folder = cli.world.home / "shares" / "mine"
    assert said.code == 0 and (folder / "data").is_dir()
    notice, quota = said.err.splitlines()
    assert notice.startswith(
        f"batchai: there is no key or SAS for the storage account 'mine', so it is the directory {folder};"
    )
    assert quota.startswith("batchai: --quota plays no part")


def alone(azure: AzureServer) -> list[tuple[list[str], dict[str, str]]]:
    """Options and variables that say all there is to say: connection strings."""
    with_key = f"AccountName={azure.account};AccountKey={azure.key};FileEndpoint={azure.endpoint}"
    with_sas = f"FileEndpoint={azure.endpoint}/;SharedAccessSignature={account_sas(azure)}"
    given: list[tuple[list[str], dict[str, str]]] = []
    for text in (with_key, with_sas):
        given += [(["--connection-string", text], {}), ([], {"AZURE_STORAGE_CONNECTION_STRING": text})]
    return given


def with_config(azure: AzureServer) -> list[tuple[list[str], dict[str, str]]]:
    """Options and variables that need config.yaml to say where the account is."""
    name, sas = azure.account, account_sas(azure)
    return [
        (["--account-name", name, "--account-key", azure.key], {}),
        (["--account-name", name, "--sas-token", f"?{sas}"], {}),
        ([], {"AZURE_STORAGE_ACCOUNT": name, "AZURE_STORAGE_SAS_TOKEN": sas}),
        ([], {"AZURE_STORAGE_ACCOUNT": name, "AZURE_STORAGE_KEY": azure.key}),
        (["--account-name", name], {"AZURE_STORAGE_KEY": azure.key}),
        ([], {"AZURE_BATCHAI_STORAGE_ACCOUNT": name, "AZURE_BATCHAI_STORAGE_KEY": azure.key}),
    ]


def account_sas(azure: AzureServer) -> str:
    return azure.sas(None, "rcwdl", ss="f", srt="sco")


@pytest.mark.parametrize("configured", [False, True])
def test_every_way_to_open_an_account(cli: Cli, azure: AzureServer, configured: bool) -> None:
    """Connection strings say where the emulator is; else config.yaml does, whose key is wrong here, since it is asked last."""
    azure.share("opened")
    if configured:
        configure(cli, azure, "A" * 86 + "==")
    for options, variables in (with_config if configured else alone)(azure):
        credentials._remembered.clear()  # each command is a process of its own elsewhere
        said = cli("storage", "share", "list", "--query", "[].name", *options, **variables)
        assert (said.code, said.err) == (0, ""), said
        assert "opened" in json.loads(said.out)


def test_options_that_dont_fit(cli: Cli, azure: AzureServer) -> None:
    connection = f"AccountName={azure.account};AccountKey={azure.key};FileEndpoint={azure.endpoint}"
    for options, words in (
        ([], "no storage account is named: give --account-name, or set AZURE_STORAGE_ACCOUNT"),
        (["--account-key", azure.key], "no storage account is named"),
        (["--account-name", "../x"], "no storage account can be called '../x'"),
        (["--account-name", "a", "--account-key", azure.key, "--sas-token", "sig=x"], "can't be given together; drop one"),
        (["--account-name", "a", "--account-key", azure.key, "--auth-mode", "login"], "can't be given together; drop one"),
        (["--account-name", "a", "--account-key", "hush!"], "--account-key: the key of storage account 'a' is not base64"),
        (["--account-name", "a", "--sas-token", "hush"], "--sas-token: the SAS of storage account 'a' has no signature"),
        (["--connection-string", "hush"], "--connection-string has no account's name, or nothing that opens it"),
        (["--connection-string", "AccountName=hush"], "or nothing that opens it; copy all of it"),
        (["--connection-string", connection, "--account-name", "other"], f"account '{azure.account}', not of 'other'"),
    ):
        said = cli("storage", "share", "list", *options)
        assert (said.code, said.out) == (2, ""), said
        assert words in said.err
        assert azure.key not in said.err and "hush" not in said.err


def test_a_wrong_key_is_a_sentence(cli: Cli, azure: AzureServer) -> None:
    configure(cli, azure)
    wrong = "A" * 86 + "=="
    for noun in (["share", "list"], ["file", "list", "-s", "data"], ["share", "create", "-n", "data"]):
        said = cli("storage", *noun, "--account-name", azure.account, "--account-key", wrong)
        assert said.code == 1
        assert f"storage account '{azure.account}' refused the account key" in said.err
        assert wrong not in said.err


def test_a_sas_of_one_share_needs_no_list_of_shares(cli: Cli, azure: AzureServer) -> None:
    configure(cli, azure)
    (azure.share("only") / "x").write_text("1")
    options = ["--account-name", azure.account, "--sas-token", azure.sas("only")]
    assert cli.json("storage", "file", "list", "-s", "only", "--query", "[].name", *options) == ["x"]
    said = cli("storage", "share", "list", *options)
    assert said.code == 1 and "the SAS" in said.err and "sig=" not in said.err


def test_a_login_is_azures(cli: Cli) -> None:
    """Nothing that we know of opens the account, and yet no directory stands for it."""
    said = cli("storage", "share", "list", "--account-name", "nobody", "--auth-mode", "login", HTTPS_PROXY="http://127.0.0.1:9")
    assert said.code == 1 and "nobody" in said.err
    assert not (cli.world.home / "shares").exists()
