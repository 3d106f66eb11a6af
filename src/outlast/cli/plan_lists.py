"""``outlast plan clusters`` and ``models``: what is known by name."""

from __future__ import annotations

from outlast.cli.plan_rank import AsJson


def clusters(json: AsJson = False) -> None:
    """List the shipped clusters, files to copy, and parts for shorthands.

    A shorthand is a part and a number of devices: h100x64, 512xa100. Whatever a
    cluster file leaves out comes from the catalogue of `outlast.hardware`.

    Example: outlast plan clusters

    --json: {"clusters": [{"name", "nodes", "devices", "device", "file"}],
    "parts": [...]}.
    """
    from importlib.resources import files

    from outlast.cli.figures import Column, output, print_json, print_table
    from outlast.hardware import devices
    from outlast.plan.cluster_file import cluster_of, shipped_clusters

    folder = files("outlast.plan").joinpath("clusters")
    found = [(name, cluster_of(name), str(folder / f"{name}.toml")) for name in shipped_clusters()]
    parts = [device.key for device in devices()]
    if json:
        print_json(
            {
                "clusters": [
                    {
                        "name": name,
                        "nodes": item.nodes,
                        "devices": item.devices,
                        "device": item.device,
                        "file": path,
                    }
                    for name, item, path in found
                ],
                "parts": parts,
            }
        )
        return
    console = output()
    rows = [
        [name, f"{e.nodes:,} x {e.devices_per_node}", e.device, f"{e.memory_bytes / 2**30:.0f} GiB"]
        for name, e, _ in found
    ]
    columns = [
        Column("cluster", number=False),
        Column("nodes"),
        Column("device", number=False),
        Column("memory"),
    ]
    print_table(console, columns, rows)
    console.print(f"\nfiles to copy and change, each NAME.toml in {folder}", markup=False)
    console.print(f"parts for shorthands such as h100x64: {', '.join(parts)}", markup=False)


def models(json: AsJson = False) -> None:
    """List the published models that can stand for SOURCE.

    Example: outlast plan models

    --json: [{"name", "parameters", "active_parameters", "layers", "hidden",
    "source"}].
    """
    from outlast.cli.figures import Column, output, print_json, print_table
    from outlast.cli.plan_words import count_words
    from outlast.plan.huggingface import MODELS, published

    found = [(name, published(name), model.source) for name, model in MODELS.items()]
    if json:
        print_json(
            [
                {
                    "name": name,
                    "parameters": item.parameters,
                    "active_parameters": item.active_parameters,
                    "layers": item.layers,
                    "hidden": item.hidden,
                    "source": source,
                }
                for name, item, source in found
            ]
        )
        return
    rows = [
        [
            name,
            count_words(item.parameters),
            count_words(item.active_parameters) if item.experts else "-",
            str(item.layers),
            f"{item.hidden:,}",
            source.removeprefix("config.json of ").replace(" on Hugging Face", ""),
        ]
        for name, item, source in found
    ]
    columns = [
        Column("model", number=False),
        Column("parameters"),
        Column("in use", optional=2),
        Column("layers"),
        Column("hidden"),
        Column("sizes from", number=False, optional=1, least=20),
    ]
    console = output()
    print_table(console, columns, rows)
    console.print("names with a slash: config.json on Hugging Face", style="dim")
