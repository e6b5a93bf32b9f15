"""What our Azure file share costs over Microsoft's SDK as its documentation uses it: many small files, and a large one.

    python benchmarks/share_transfer.py [--pairs 3] [--files 1000] [--megabytes 1024]

A server process of this machine stands for the service, once at its own speed and once with 20 ms more for each answer. Each
round runs the SDK, ours, the SDK: small files by its sequential loop (``upload_file`` and ``download_file`` for each, folders
made before), the large one by the same with the ``max_concurrency`` that was best. A ratio is the SDK's time over ours. Client
and server share the same cores, so without the 20 ms it is mostly the price of Python on both sides of a request.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from azure.core.credentials import AzureNamedKeyCredential
from azure.storage.fileshare import ShareClient

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from azure_server import AzureServer

from mlflow_batchai.storage import Share, credentials, open_share
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.objects import StagedFile, scan_input, upload

LATENCY_SECONDS = 0.02
CONCURRENCIES = (4, 8, 16)
SMALL_BYTES = 2000
BLOCK = 1 << 20


class Rounds:
    """Times of one thing in rounds of the SDK, ours, the SDK."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    def add(self, bare: Callable[[], None], ours: Callable[[], None]) -> None:
        self.rows.append((seconds(bare), seconds(ours), seconds(bare)))

    @property
    def ratios(self) -> list[float]:
        return [(one + two) / 2 / own for one, own, two in self.rows]

    @property
    def noise(self) -> list[float]:
        return [two / one for one, _, two in self.rows]

    @property
    def own(self) -> list[float]:
        return [own for _, own, _ in self.rows]


def seconds(act: Callable[[], None]) -> float:
    """How long something takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


class Bench:
    """One server, one folder of small files and one large file."""

    def __init__(self, server: AzureServer, scratch: Path, files: int, megabytes: int) -> None:
        self._server = server
        self._scratch = scratch
        self._count = 0
        self._folder = scratch / "small"
        for number in range(files):
            path = self._folder / f"{number % 10}" / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(SMALL_BYTES))
        self.small: list[StagedFile] = scan_input(self._folder)
        self._large = scratch / "large"
        block = os.urandom(BLOCK)
        with self._large.open("wb") as file:
            for number in range(megabytes):
                file.write(block[number % 1000 :] + block[: number % 1000])

    def share(self) -> tuple[ShareClient, Share]:
        """A new share, as the SDK and as we open it."""
        self._count += 1
        name = f"share-{self._count}"
        self._server.share(name)
        key = AzureNamedKeyCredential(self._server.account, self._server.key)
        return ShareClient(self._server.endpoint, name, credential=key), open_share(self._server.url(name))

    def upload_small(self, rounds: Rounds) -> None:
        client, share = self.share()
        folders = {file.sha256[:2] for file in self.small}

        def bare() -> None:
            self._count += 1
            client.create_directory(f"bare-{self._count}")
            for folder in folders:
                client.create_directory(f"bare-{self._count}/{folder}")
            for file in self.small:
                target = client.get_file_client(f"bare-{self._count}/{file.sha256[:2]}/{file.sha256}")
                target.upload_file(file.source.read_bytes())

        def ours() -> None:
            if upload(share, self.small) != SMALL_BYTES * len(self.small):
                sys.exit("not all was sent")

        rounds.add(bare, ours)

    def unchanged(self) -> tuple[float, int]:
        """(seconds, requests) of sending a folder that lies there, as a submit does it."""
        _, share = self.share()
        upload(share, self.small)
        self._server.reset()

        def again() -> None:
            if upload(share, self.small):
                sys.exit("an unchanged project was sent")

        taken = seconds(again)
        return taken, len(self._server.requests())

    def download_small(self, rounds: Rounds) -> None:
        client, share = self.share()
        upload(share, self.small)
        paths = [f".batchai/objects/{file.sha256[:2]}/{file.sha256}" for file in self.small]
        target = self._scratch / "down"
        target.mkdir()

        def bare() -> None:
            for number, path in enumerate(paths):
                with (target / f"bare{number}").open("wb") as file:
                    client.get_file_client(path).download_file().readinto(file)

        def ours() -> None:
            with ThreadPoolExecutor(share.at_once) as pool:
                list(pool.map(lambda pair: share.download(pair[1], target / f"ours{pair[0]}"), enumerate(paths)))

        rounds.add(bare, ours)
        shutil.rmtree(target)

    def upload_large(self, rounds: Rounds, concurrency: int) -> None:
        client, share = self.share()

        def bare() -> None:
            with self._large.open("rb") as file:
                length = self._large.stat().st_size
                client.get_file_client("bare").upload_file(file, length=length, max_concurrency=concurrency)
            client.get_file_client("bare").delete_file()

        def ours() -> None:
            with self._large.open("rb") as file:
                share.send("ours", file, self._large.stat().st_size)
            share.delete("ours")

        rounds.add(bare, ours)

    def download_large(self, rounds: Rounds, concurrency: int) -> None:
        client, share = self.share()
        with self._large.open("rb") as file:
            share.send("large", file, self._large.stat().st_size)
        down = self._scratch / "down"
        down.mkdir()

        def bare() -> None:
            with (down / "bare").open("wb") as file:
                client.get_file_client("large").download_file(max_concurrency=concurrency).readinto(file)
            (down / "bare").unlink()

        def ours() -> None:
            share.download("large", down / "ours")
            # What is still to be written to the disk must not be the next one's burden.
            (down / "ours").unlink()

        rounds.add(bare, ours)
        share.delete("large")
        shutil.rmtree(down)

    def best(self) -> tuple[int, int]:
        """The SDK's best max_concurrency for this file: up, down."""
        client, _ = self.share()
        target = self._scratch / "best"

        def up(concurrency: int) -> None:
            with self._large.open("rb") as file:
                length = self._large.stat().st_size
                client.get_file_client("best").upload_file(file, length=length, max_concurrency=concurrency)

        def down(concurrency: int) -> None:
            with target.open("wb") as file:
                client.get_file_client("best").download_file(max_concurrency=concurrency).readinto(file)

        chosen = (
            min(CONCURRENCIES, key=lambda number: seconds(lambda: up(number))),
            min(CONCURRENCIES, key=lambda number: seconds(lambda: down(number))),
        )
        client.get_file_client("best").delete_file()
        target.unlink()
        return chosen


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=1024)
    options = parser.parse_args()
    print(
        f"{options.pairs} rounds of SDK, ours, SDK; {options.files} files of {SMALL_BYTES} bytes, one of "
        f"{options.megabytes} MiB, {os.cpu_count()} cores; medians (min to max)\n"
    )
    with (
        tempfile.TemporaryDirectory(prefix="share-transfer-") as scratch,
        AzureServer(Path(scratch)) as server,
    ):
        credentials.name_endpoint(server.endpoint)
        credentials.remember(server.account, Credential(server.key))
        bench = Bench(server, Path(scratch), options.files, options.megabytes)
        for latency, where in ((0.0, "loopback"), (LATENCY_SECONDS, f"{LATENCY_SECONDS * 1000:.0f} ms")):
            server.latency(latency)
            up, down = bench.best()
            table = {
                f"{where}: upload of small files": (bench.upload_small, ()),
                f"{where}: download of small files": (bench.download_small, ()),
                f"{where}: upload of the large file": (bench.upload_large, (up,)),
                f"{where}: download of the large file": (bench.download_large, (down,)),
            }
            for title, (act, arguments) in table.items():
                rounds = Rounds()
                for _ in range(options.pairs):
                    act(rounds, *arguments)
                    server.reset()
                _row(f"{title}: SDK / ours", rounds.ratios)
                _row(f"{title}: SDK / SDK", rounds.noise)
                _row(f"{title}: ours (s)", rounds.own)
            taken, requests = bench.unchanged()
            _row(f"{where}: upload of small files that lie there (s)", [taken])
            _row(f"{where}: upload of small files that lie there (requests)", [requests])


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})", flush=True)


if __name__ == "__main__":
    main()
