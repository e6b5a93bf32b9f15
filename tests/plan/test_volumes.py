"""Which volumes a job mounts, what opens them on nodes, and every way in which a document can't mean what it says."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest
from plans import BARE

from mlflow_batchai.agent.plan import LogPlace, plain
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.cluster import ClusterDocument, parse_cluster
from mlflow_batchai.documents.job import JobProperties
from mlflow_batchai.documents.model import parse as parse_model
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.engines.base import StartRequest
from mlflow_batchai.errors import DocumentError, NotSupportedError, ShareError
from mlflow_batchai.job.places import place_logs
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.plan.volumes import check_volumes, choose_volumes, cluster_volumes
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.location import parse

KEY = base64.b64encode(b"k" * 64).decode()
DATA = "https://acc.file.core.windows.net/data"
CONTROL = "https://ctl.file.core.windows.net/batchai/team"

pytestmark = pytest.mark.usefixtures("no_storage_credentials")


@pytest.fixture
def choose(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))

    def choose(mounts=None, azure=False, local=False, **cluster_keys):
        document, _ = parse_cluster(cluster_keys, "c.yaml")
        assert isinstance(document, ClusterDocument)
        # As ``clusters.make`` does with what a document names.
        monkeypatch.setattr(credentials, "_named", {*filter(None, (document.file_endpoint, document.blob_endpoint))})
        home = DirectoryShare(tmp_path / "home")
        location = parse(CONTROL) if azure else None
        share = SimpleNamespace(url=CONTROL) if azure else DirectoryShare(tmp_path / "share")
        mount = document.mount or (None if local else "rclone")
        places = (home, "shares", str(home.root / "shares"))
        on_nodes = CONTROL if azure else str(tmp_path / "share")
        cluster = Cluster("c", document, share, None, on_nodes, mount, places, "/py", None, location)
        properties, _ = parse_model(JobProperties, {"mountVolumes": mounts or {}}, "job.json")
        choose.look = lambda: cluster_volumes(cluster)
        chosen = choose_volumes(properties, cluster, "job.json", 3600.0)
        choose.check = lambda: check_volumes(chosen.volumes, cluster)
        return chosen

    return choose


def file_share(**changes):
    entry = {"azureFileUrl": DATA, "relativeMountPath": "afs", "credentials": {"accountKey": KEY}, **changes}
    return {"azureFileShares": [{key: value for key, value in entry.items() if value is not None}]}


def test_a_file_share_goes_by_a_sas_that_opens_no_other(choose):
    chosen = choose(file_share(azureFileUrl=f"{DATA}/a%20b/c", fileMode="0640"))
    assert plain(chosen.volumes[1]) == {
        "scope": "job",
        "path": "afs",
        "where": "job.json: mountVolumes.azureFileShares[0]",
        "name": "file share acc/data",
        "share": f"{DATA}/a%20b/c",
        "kind": "azureFiles",
        "how": "rclone",
        "endpoint": "https://acc.file.core.windows.net",
        "account": "acc",
        "container": "data",
        "folder": "a b/c",
        "fileMode": "0640",
        "directoryMode": "0777",
    }
    opens = parse_qs(chosen.credentials["1"]["sas"])
    assert (opens["sr"], opens["sp"]) == (["s"], ["rcwdl"])
    assert set(chosen.credentials) == {"1"}
    assert KEY not in json.dumps(plain(tuple(chosen.volumes)))


def test_smb_takes_the_key_and_what_is_mounted_already_nothing(choose):
    key = {"key": KEY, "endpoint": "https://acc.file.core.windows.net"}
    assert choose(file_share(), mount="cifs").credentials == {"1": key}
    chosen = choose(file_share(credentials=None), mount="bind", mountedAt={"acc/data": "/mnt/data"})
    assert (chosen.volumes[1].how, chosen.volumes[1].source, chosen.credentials) == ("bind", "/mnt/data", {})


def test_the_control_share_is_a_volume_like_others(choose, monkeypatch):
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "ctl")
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", KEY)
    chosen = choose(azure=True)
    control = chosen.volumes[0]
    assert (control.scope, control.path, control.container, control.folder) == ("cluster", "share", "batchai", "team")
    assert "sig" in parse_qs(chosen.credentials["0"]["sas"])


def test_who_only_looks_needs_nothing_that_opens_it(choose, monkeypatch):
    """Nor does he ask Azure: with a login each SAS is a request."""

    def fail(*given):
        raise ShareError("no login")

    monkeypatch.setattr("mlflow_batchai.plan.volumes.for_nodes", fail)
    with pytest.raises(DocumentError, match="no login"):
        choose(azure=True)
    assert [volume.path for volume in choose.look()] == ["share"]


def test_placeholders_are_filled_from_the_environment(choose, monkeypatch):
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "acc")
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", KEY)
    url = "https://<AZURE_BATCHAI_STORAGE_ACCOUNT>.file.core.windows.net/data"
    for given in (
        {"credentials": None},
        {"credentials": {"accountKey": "<AZURE_BATCHAI_STORAGE_KEY>"}, "accountName": "<AZURE_BATCHAI_STORAGE_ACCOUNT>"},
    ):
        chosen = choose(file_share(azureFileUrl=url, **given), mount="cifs")
        assert (chosen.volumes[1].share, chosen.credentials["1"]["key"]) == (DATA, KEY)


def test_what_opens_a_volume_is_in_no_repr(choose):
    chosen = choose(file_share(), mount="cifs")
    assert chosen.credentials["1"]["key"] == KEY
    told = {"volumes": chosen.credentials, "registry": {"username": "u", "password": "hush-hush"}}
    prepared = Prepared(BARE, {"TOKEN": "hush-hush"}, told, 1.0, [])
    request = StartRequest("j", "j/1", "folder", 1, 2, {"variables": prepared.secrets, **told})
    for shown in map(repr, (chosen, prepared, request, Credential(KEY, None))):
        assert KEY not in shown and "hush" not in shown


def test_a_sas_of_the_users_is_passed_on_and_that_a_job_may_outlive_it_is_told_once(choose, monkeypatch):
    ends = datetime.now(timezone.utc) + timedelta(minutes=30)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acc")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=1&ss=f&srt=sco&sp=rwdlc&se=2999-01-01T00:00:00Z&sig=x")
    chosen = choose(file_share(credentials=None))
    assert chosen.credentials["1"]["sas"].startswith("sv=1&") and chosen.warnings == []
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=1&ss=f&srt=sco&sp=rwdlc&se={ends:%Y-%m-%dT%H:%M:%SZ}&sig=x")
    entries = [*file_share(credentials=None)["azureFileShares"]] * 2
    second = {**entries[1], "relativeMountPath": "other"}
    [warning] = choose({"azureFileShares": [entries[0], second]}).warnings
    assert warning == f"the SAS of storage account 'acc' ends at {ends:%Y-%m-%d %H:%M} UTC: a job that still runs then fails"


def test_the_other_kinds(choose):
    chosen = choose(
        {
            "azureBlobFileSystems": [
                {"accountName": "acc", "containerName": "train", "credentials": {"accountKey": KEY}, "relativeMountPath": "bfs"}
            ],
            "fileServers": [
                {"fileServer": {"id": "/x/fileServers/nfs"}, "sourceDirectory": "sub/", "relativeMountPath": "nfs"}
            ],
            "unmanagedFileSystems": [{"mountCommand": "mount -t tmpfs none", "relativeMountPath": "ram"}],
        },
        blobMount="blobfuse2",  # of earlier documents
        fileServers={"nfs": "10.0.0.9:/data"},
        blobEndpoint="http://127.0.0.1:1/ACCOUNT/",
    )
    blob, nfs, ram = chosen.volumes[1:]
    assert (blob.kind, blob.how, blob.endpoint) == ("azureBlob", "rclone", "http://127.0.0.1:1/acc")
    assert chosen.credentials == {"1": {"key": KEY, "endpoint": blob.endpoint}}
    assert (nfs.kind, nfs.source, nfs.share) == ("nfs", "10.0.0.9:/data/sub", None)
    assert (ram.kind, ram.command) == ("command", "mount -t tmpfs none")


def test_a_clusters_volumes_come_before_the_jobs(choose):
    node_setup = {"mountVolumes": {"unmanagedFileSystems": [{"mountCommand": "m", "relativeMountPath": "ram"}]}}
    chosen = choose(file_share(), nodeSetup=node_setup)
    assert [(volume.scope, volume.path) for volume in chosen.volumes] == [
        ("cluster", "share"),
        ("cluster", "ram"),
        ("job", "afs"),
    ]
    assert set(chosen.credentials) == {"2"}


def kinds(chosen):
    """How each volume but the control share is mounted, and what opens it."""
    return [
        (volume.how or volume.kind, set(chosen.credentials.get(str(n), ())) - {"endpoint"})
        for n, volume in enumerate(chosen.volumes)
    ][1:]


@pytest.mark.parametrize(
    "given",
    [
        None,
        {"accountKey": "REDACTED"},
        {"accountKey": "no key!"},
        {"accountKey": "<AZURE_BATCHAI_STORAGE_KEY>"},
        {"accountKeySecretReference": {"sourceVault": {"id": "v"}, "secretUrl": "https://v/s"}},
    ],
)
def test_an_account_that_nothing_opens_is_a_directory_and_one_notice_says_so(choose, tmp_path, given):
    one = file_share(azureFileUrl=f"{DATA}/in/it", credentials=given)["azureFileShares"]
    other = file_share(relativeMountPath="more", azureFileUrl=DATA.replace("data", "more"))["azureFileShares"]
    other[0].pop("credentials")
    chosen = choose({"azureFileShares": one + other}, local=True)
    assert kinds(chosen) == [("link", set())] * 2
    folder = tmp_path / "home" / "shares" / "acc"
    assert [volume.source for volume in chosen.volumes[1:]] == [str(folder / "data" / "in" / "it"), str(folder / "more")]
    assert not folder.exists()
    choose.check()
    assert (folder / "data" / "in" / "it").is_dir() and (folder / "more").is_dir()
    [notice] = chosen.warnings
    assert notice.startswith(
        f"job.json: there is no key or SAS for the storage account 'acc', so it is the directory {folder}; if it is"
    )


def test_an_account_with_credentials_is_azures(choose, tmp_path, monkeypatch):
    assert kinds(choose(file_share(), local=True)) == [("rclone", {"sas"})]
    monkeypatch.setattr(credentials, "_remembered", {})
    nothing = file_share(credentials=None)
    assert kinds(choose(nothing, local=True)) == [("link", set())]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.yaml").write_text(
        f"shares: {{acc: {{accountKey: '{KEY}', fileEndpoint: 'http://10.0.0.1:1/ACCOUNT'}}}}"
    )
    chosen = choose(nothing, local=True)
    assert kinds(chosen) == [("rclone", {"sas"})]
    assert chosen.volumes[1].share == "http://10.0.0.1:1/acc/data"
    assert chosen.warnings == []
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", KEY)
    (tmp_path / "home" / "config.yaml").unlink()
    assert kinds(choose(file_share(credentials={"accountKey": "<AZURE_BATCHAI_STORAGE_KEY>"}), local=True)) == [
        ("rclone", {"sas"})
    ]


def test_a_control_shares_account_is_azures_whoever_opens_it(choose, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "ctl")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=1&ss=f&srt=sco&sp=rwdlc&se=2999-01-01T00:00:00Z&sig=x")
    mounts = file_share(credentials=None, azureFileUrl="https://<AZURE_BATCHAI_STORAGE_ACCOUNT>.file.core.windows.net/data")
    assert kinds(choose(mounts, azure=True, local=True)) == [("rclone", {"sas"})]
    mounts["azureFileShares"][0]["credentials"] = {"accountKey": "REDACTED"}
    chosen = choose(mounts, azure=True, local=True)
    assert chosen.credentials["1"]["sas"].endswith("&sig=x")
    assert kinds(choose(file_share(credentials=None), azure=True, local=True)) == [("link", set())]


def test_the_tutorials_document_needs_no_account(choose, tmp_path, monkeypatch):
    url = "https://<AZURE_BATCHAI_STORAGE_ACCOUNT>.file.core.windows.net/batchaishare"
    mounts = file_share(azureFileUrl=url, credentials=None)
    chosen = choose(mounts, local=True)
    folder = tmp_path / "home" / "shares" / "local"
    assert chosen.volumes[1].source == str(folder / "batchaishare")
    assert chosen.warnings[0].startswith(
        f"job.json: file shares of no named storage account are directories of {folder}; if they are"
    )
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "mine")
    assert choose(mounts, local=True).volumes[1].name == "file share mine/batchaishare"


def test_a_cluster_whose_document_says_how_does_that(choose, tmp_path):
    chosen = choose(file_share(), local=True, mount="folder")
    assert kinds(chosen) == [("link", set())]
    assert chosen.warnings == [f"on cluster 'c' the file share acc/data is the directory {tmp_path}/home/shares/acc/data"]
    with pytest.raises(DocumentError, match="is not base64"):
        choose(file_share(credentials={"accountKey": "no key!"}), local=True, mount="rclone")


def test_a_blob_container_that_nothing_opens_is_a_folder_of_this_machine(choose, tmp_path, monkeypatch):
    """As a file share is, whatever stands in place of its key, and with a key it is Azure's."""
    entry = {"accountName": "acc", "containerName": "data", "relativeMountPath": "b"}
    folder = tmp_path / "home" / "shares" / "acc" / "blobs" / "data"
    for given in (
        {},
        {"credentials": {"accountKey": "REDACTED"}},
        {"credentials": {"accountKey": "<AZURE_BATCHAI_STORAGE_KEY>"}},
    ):
        chosen = choose({"azureBlobFileSystems": [{**entry, **given}]}, local=True)
        assert (kinds(chosen), chosen.volumes[1].source) == ([("link", set())], str(folder))
        assert f"its blob container data is the directory {folder}; if it is Azure's, set AZURE" in chosen.warnings[0]
    choose.check()
    assert folder.is_dir()
    unnamed = {"azureBlobFileSystems": [{"containerName": "data", "relativeMountPath": "b"}]}  # as --bfs-name writes it
    assert choose(unnamed, local=True).volumes[1].source == str(tmp_path / "home/shares/local/blobs/data")
    chosen = choose({"azureBlobFileSystems": [{**entry, "credentials": {"accountKey": KEY}}]}, local=True)
    assert kinds(chosen) == [("rclone", {"key"})]
    assert kinds(choose({"azureBlobFileSystems": [entry]}, local=True, mount="folder")) == [("rclone", {"key"})]
    monkeypatch.setattr(credentials, "_remembered", {})
    assert kinds(choose({"azureBlobFileSystems": [entry]}, local=True, mount="folder")) == [("link", set())]


ACCOUNT = DATA.removesuffix("/data")
REFUSED = [
    (file_share(azureFileUrl=ACCOUNT), {}, r"azureFileShares\[0\]: azureFileUrl: .*no file share"),
    (file_share(azureFileUrl=f"{ACCOUNT}/a/../../b"), {}, "a path on a share has no '.', '..' or NUL"),
    (file_share(accountName="other"), {}, "is of the storage account 'acc', not of 'other'"),
    (file_share(credentials={"accountKey": "no key!"}), {}, r"azureFileShares\[0\]: the key of storage account 'acc'.*base64"),
    (
        file_share(credentials={"accountKey": "<AZURE_BATCHAI_STORAGE_KEY>"}),
        {},
        "set AZURE_BATCHAI_STORAGE_KEY to the account.s",
    ),
    (file_share(accountName="<AZURE_BATCHAI_STORAGE_ACCOUNT>"), {}, "accountName has the placeholder .* set AZURE_BATCHAI"),
    (file_share(credentials=None), {"mount": "cifs"}, "SMB opens a share of acc only with the account's key"),
    (file_share(), {"mount": "bind"}, "doesn't say where its nodes have acc/data; add it to mountedAt"),
]
NFS, BLOBS = "fileServer: {id: /x/nfs}, relativeMountPath: nfs", "accountName: acc, relativeMountPath: b"
RAM = "unmanagedFileSystems: [{mountCommand: m, relativeMountPath: share}]"
REFUSED += [
    (load_text(mounts, "job.yaml"), load_text(cluster, "c.yaml"), sentence)
    for mounts, cluster, sentence in (
        (f"fileServers: [{{{NFS}}}]", "{}", "doesn't say where the file server nfs is; add it to fileServers"),
        (f"fileServers: [{{{NFS}, sourceDirectory: ../x}}]", "fileServers: {nfs: 'h:/d'}", r"sourceDirectory is '\.\./x'"),
        (f"azureBlobFileSystems: [{{{BLOBS}, containerName: train}}]", "{}", "there is no key for the account acc"),
        (f"azureBlobFileSystems: [{{{BLOBS}, containerName: No/Name}}]", "{}", "no blob container can be called"),
        (
            "unmanagedFileSystems: [{mountCommand: m, relativeMountPath: data}, {mountCommand: m, relativeMountPath: data/inner}]",
            "{}",
            r"\[1\] .* is mounted at 'data/inner', inside of .*\[0\] .* at 'data'; mount it beside",
        ),
        ("{}", f"nodeSetup: {{mountVolumes: {{{RAM}}}}}", "is mounted at 'share', and so is cluster 'c': share"),
    )
]


@pytest.mark.parametrize(("mounts", "keys", "sentence"), REFUSED)
def test_refused(choose, mounts, keys, sentence):
    with pytest.raises(DocumentError, match=sentence) as caught:
        choose(mounts, **keys)
    assert KEY not in str(caught.value)


def test_a_key_vault_is_not_asked_and_a_sas_that_has_expired_is_no_good(choose, monkeypatch):
    reference = {"accountKeySecretReference": {"sourceVault": {"id": "v"}, "secretUrl": "https://v/s"}}
    with pytest.raises(NotSupportedError, match="Key Vault"):
        choose(file_share(credentials=reference))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acc")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&ss=f&srt=sco&sp=rwdlc&se=2020-01-01T00:00:00Z&sig=x")
    with pytest.raises(DocumentError, match=r"\(file share acc/data\): the SAS of storage account 'acc' expired at 2020"):
        choose(file_share(credentials=None))


def placed(volumes, prefix, outputs=()):
    properties, _ = parse_model(
        JobProperties,
        {"stdOutErrPathPrefix": prefix, "outputDirectories": [{"id": "M", "pathPrefix": path} for path in outputs]},
        "job.json",
    )
    return place_logs(properties, volumes, "job.json")


def test_a_volume_that_is_the_control_share_holds_the_job_folder(choose, monkeypatch):
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "ctl")
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", KEY)
    for url, folder in ((CONTROL, "logs"), (f"{CONTROL}/deep/er", "deep/er/logs")):
        volumes = choose(file_share(azureFileUrl=url), azure=True).volumes
        assert placed(volumes, "$AZ_BATCHAI_JOB_MOUNT_ROOT/afs/logs") == (folder, None, [])
    for url in ("https://ctl.file.core.windows.net/batchai", f"{CONTROL}s"):
        volumes = choose(file_share(azureFileUrl=url), azure=True).volumes
        assert placed(volumes, "$AZ_BATCHAI_JOB_MOUNT_ROOT/afs/logs") == ("", LogPlace(1, "logs"), [])


def test_outputs_that_nobody_here_can_read_are_told_of(choose):
    volumes = choose({"unmanagedFileSystems": [{"mountCommand": "m", "relativeMountPath": "ram"}]}).volumes
    _, _, warnings = placed(volumes, "$AZ_BATCHAI_MOUNT_ROOT/share", ["$AZ_BATCHAI_JOB_MOUNT_ROOT/ram"])
    assert "outputDirectories M lies on unmanaged file system ram, which this machine can't read" in warnings[0]
