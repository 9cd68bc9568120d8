"""`vllm-delta-sync inspect`: what a log, or one file of it, holds.

Does not check shards' digests: `verify` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_delta_sync.cli import output
from vllm_delta_sync.errors import NotFound
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.wire import codec_rules, container, state_hash
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.manifest import FORMAT, LatestPointer, Manifest
from vllm_delta_sync.wire.table import VersionTable


def inspect(
    where: Annotated[str, typer.Argument(help="A log (URI or path), or the path of one of its files.")],
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Show a log's versions, or what a shard, table, manifest, catalog or LATEST holds."""
    path = Path(where)
    found = _file(path) if path.is_file() else _log(DeltaLog.open(where, run))
    if json:
        output.print_json(found)
        return
    console = Console()
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            console.print(_grid(name, value))
        else:
            console.print(output.printable(f"{name}: {value}"), markup=False, highlight=False, soft_wrap=True)


def _log(log: DeltaLog) -> dict[str, object]:
    versions = [_version(manifest) for manifest in log.manifests()]
    return {"uri": log.store.uri, "run": log.run, "versions": versions}


def _version(manifest: Manifest) -> dict[str, object]:
    totals = manifest.totals
    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "step": manifest.step,
        "changed": totals.changed,
        "changed_percent": round(100 * totals.changed / totals.elements, 4) if totals.elements else 0.0,
        "bytes": totals.bytes,
        "bytes_per_change": round(totals.bytes / totals.changed, 3) if totals.changed else None,
        "shards": len(manifest.shards),
        "anchor": manifest.anchor is not None,
        "created": manifest.created,
    }


def _file(path: Path) -> dict[str, object]:
    data, what = path.read_bytes(), str(path)
    if path.name.endswith(".table.zst"):
        return _table(VersionTable.from_bytes(data, what))
    if path.name.endswith(".manifest.json"):
        return Manifest.from_bytes(data, what).model_dump(mode="json")
    if path.name == "LATEST":
        return LatestPointer.from_bytes(data, what).model_dump(mode="json")
    if path.name.endswith(".safetensors"):
        return _safetensors(data, what)
    if path.name.endswith(".json") and path.parent.name == "catalogs":
        return Catalog.from_bytes(data, what).model_dump(mode="json")
    raise NotFound(
        f"{path} is none of *.manifest.json, *.table.zst, *.safetensors, catalogs/*.json and LATEST; name one, or a log"
    )


def _safetensors(data: bytes, what: str) -> dict[str, object]:
    """A shard, with its table when it is a first one, or a file of an anchor."""
    header = container.parse_file(data, what, max_header=container.CHECKPOINT_HEADER_BYTES)
    entries = [
        {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.end - entry.start}
        for name, entry in sorted(header.entries.items(), key=lambda item: (item[1].start, item[1].end))
    ]
    found: dict[str, object] = {"metadata": header.metadata, "data_start": header.data_start, "entries": entries}
    table = header.entries.get("table")
    if header.metadata.get("format") == FORMAT and table is not None:
        found |= _table(VersionTable.from_bytes(data[table.start : table.end], f"{what}, table"))
    return found


def _table(table: VersionTable) -> dict[str, object]:
    tensors = [
        {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "hash": state_hash.to_hex(lanes)}
        for spec, lanes in zip(table.tensors, table.hashes, strict=True)
    ]
    blocks = [
        {
            "tensor": block.spec.name,
            "start": block.start,
            "count": block.count,
            "codec": codec_rules.NAMES[block.codec],
            "changed": block.changed,
            "shard": block.shard,
            "offset": block.offset,
            "bytes": block.stored,
            "bytes_per_change": round(block.stored / block.changed, 3),
        }
        for block in table.blocks
    ]
    return {"tensors": tensors, "blocks": blocks}


def _grid(title: str, rows: list[dict[str, object]]) -> Table:
    grid = Table(title=title, title_justify="left")
    for name in rows[0]:
        grid.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        grid.add_row(*(Text("–" if value is None else output.printable(str(value))) for value in row.values()))
    return grid
