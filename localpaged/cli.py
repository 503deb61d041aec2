"""The command line. Reads arguments and hands over; the only module that reaches everywhere."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from localpaged import __version__, bench_cli
from localpaged.errors import LocalpagedError
from localpaged.user_cli import user_app

app = typer.Typer(
    name="localpaged",
    help="Local chat server: several candidate answers side by side at nearly the price of one.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(user_app, name="user")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Path, or a name of `localpaged list`.")]
KvDisk = Annotated[str | None, typer.Option(help="Disk for KV of conversations, such as 10G; 0 keeps none.")]
KvMemory = Annotated[str | None, typer.Option(help="Memory for KV, such as 2G.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens a KV block, 8 to 128 (16).")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32; on a card bfloat16, float16.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence (the model's window).")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Candidates that run at once (64).")]
MaxBatched = Annotated[int | None, typer.Option(help="Token budget of one step.")]
Prefix = Annotated[
    bool | None,
    typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Keep and reuse computed prefixes."),
]
GpuMemory = Annotated[float | None, typer.Option(help="Share of the device's memory for weights and KV.")]
KvDtype = Annotated[str | None, typer.Option(help="auto; on a card also int8, fp8.")]
Swap = Annotated[float | None, typer.Option(help="GiB of memory for KV that had to leave the pool (0).")]


def _print_version(value: bool) -> None:
    if value:
        print(f"localpaged {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Example: localpaged serve --open   Example: localpaged serve --model owner/name --kv-cache-memory 8G"
)
def serve(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Path, or a name of `localpaged list`; or the remote's model.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="local, or openai: another server's model (--base-url).")] = None,
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible server, such as http://host:8000/v1.")] = None,
    remote_api_key: Annotated[str | None, typer.Option(help="Key for that server.")] = None,
    remote_api_key_file: Annotated[Path | None, typer.Option(help="File that holds that key.")] = None,
    remote_timeout: Annotated[float | None, typer.Option(help="Seconds that server may be silent (300).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1); others need a key.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (7860); 0 takes a free one.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send.")] = None,
    max_request_bytes: Annotated[str | None, typer.Option(help="Largest body of a request (32M).")] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a request's head and for more of its body (30).")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(help="API requests at once, waiting ones too (256).")] = None,
    stop_timeout: Annotated[float | None, typer.Option(help="Seconds to finish in at the end (8).")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Further host names to answer to.")] = None,
    allowed_origin: Annotated[list[str] | None, typer.Option(help="Other sites whose pages may call the API.")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name of the model in the API.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    block_size: BlockSize = None,
    kv_cache_memory: KvMemory = None,
    kv_disk_space: KvDisk = None,
    kv_cache_dtype: KvDtype = None,
    gpu_memory_utilization: GpuMemory = None,
    swap_space: Swap = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatched = None,
    enable_prefix_caching: Prefix = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
    debug: Annotated[bool | None, typer.Option("--debug", help="Audit the block pool when idle.")] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the browser when it is ready.")] = False,
) -> None:
    """Start the chat server with its web page and API."""
    flags = {name: value for name, value in locals().items() if name != "open_browser"}
    from localpaged.config import load_settings

    settings = load_settings(**flags)
    from localpaged.server.serve import serve as run_server

    def make_page() -> Any:
        # Gradio takes seconds to import; the model loads meanwhile.
        from localpaged.ui.page import page

        return page()

    run_server(settings, make_page, open_browser=open_browser)


@app.command(epilog='Example: localpaged run "Three names for a boat"   Example: localpaged run -n 4')
def run(
    prompt: Annotated[str | None, typer.Argument(help="Ask this and end; without it, chat.")] = None,
    n: Annotated[int, typer.Option("-n", help="Candidate answers, 1 to 8.")] = 1,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same answers.")] = None,
    kv_cache_memory: KvMemory = None,
    json_output: Json = False,
) -> None:
    """Chat in the terminal; candidates are numbered, Ctrl-C stops an answer and keeps the chat."""
    from localpaged.config import load_settings
    from localpaged.engine.sampling_params import SamplingParams
    from localpaged.terminal import chat

    if not 1 <= n <= 8:
        raise typer.BadParameter(f"-n is {n}; it must be from 1 to 8.")
    params = SamplingParams(n=n, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    chat(load_settings(model=model, kv_cache_memory=kv_cache_memory), params, prompt, system, json_output)


@app.command(epilog="Example: localpaged pull owner/name   Example: localpaged pull owner/name-GGUF:Q4_K_M")
def pull(
    name: Annotated[str, typer.Argument(help="owner/name on the hub; a GGUF's quantisation after a colon.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit (main).")] = None,
    json_output: Json = False,
) -> None:
    """Fetch a model from the hub; finished files are kept, so an interrupted pull goes on."""
    from localpaged.models.hub import pull_model

    model = pull_model(name, revision)
    _show({"name": model.name, "path": str(model.path), "bytes": model.num_bytes}, json_output)


@app.command("list")
def list_command(json_output: Json = False) -> None:
    """List the models on this machine."""
    from localpaged.models.locate import list_models

    models = [
        {"name": m.name, "bytes": m.num_bytes, "path": str(m.path), "embedded": m.embedded} for m in list_models()
    ]
    if json_output:
        print(json.dumps(models))
        return
    if not models:
        print("There is no model here. Fetch one: localpaged pull owner/name")
    for model in models:
        note = "  (embedded, small)" if model["embedded"] else ""
        print(f"{model['name']:<44} {_human(int(str(model['bytes']))):>9}{note}")


@app.command()
def show(name: Annotated[str | None, typer.Argument(help="Model.")] = None, json_output: Json = False) -> None:
    """Show a model's architecture, window, and what its KV takes."""
    from localpaged.models.load import open_checkpoint
    from localpaged.models.locate import locate_model

    model = locate_model(name)
    config = open_checkpoint(model.path).config
    _show(
        {
            "name": model.name,
            "path": str(model.path),
            "bytes": model.num_bytes,
            "architecture": config.architecture,
            "window": config.max_position_embeddings,
            "layers": config.num_layers,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "kv_bytes_per_token": config.kv_bytes_per_token(element_bytes=4),
        },
        json_output,
    )


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help="Model, as `localpaged list` names it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a pulled model from this machine."""
    from localpaged.models.hub import remove_model
    from localpaged.models.locate import locate_model

    model = locate_model(name)
    if not yes and not typer.confirm(f"Remove {model.name} ({_human(model.num_bytes)})?"):
        print("Kept.")
        return
    remove_model(model)
    print(f"Removed {model.name}.")


@app.command()
def ps(
    port: Annotated[int | None, typer.Option(help="Port of the server (7860).")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.")] = None,
    json_output: Json = False,
) -> None:
    """Show what a running server does: its model, its pool of blocks, and where each conversation's KV is."""
    from localpaged.config import load_settings
    from localpaged.terminal import fetch_status

    settings = load_settings(port=port, api_key=api_key)
    status = fetch_status(settings)
    if json_output:
        _show(status, json_output)
        return
    conversations = status.pop("conversations")
    _show(status, json_output)
    if conversations:
        names = f"{'tokens':>7} {'blocks':>7} {'private':>7} {'memory':>9} {'disk':>9} {'used':>9}"
        print(f"\n{'chat':>5}  {'kv':<5} {names}  title")
    for one in conversations:
        in_memory = one["num_bytes"] + one["num_host_bytes"]
        print(
            f"{one['conversation']:>5}  {one['tier']:<5} {one['num_tokens']:>7} {one['num_blocks']:>7} "
            f"{one['num_private_blocks']:>7} {_human(in_memory):>9} {_human(one['num_disk_bytes']):>9} "
            f"{_ago(one['used_at']):>9}  "
            f"{one['title']}{' (pinned)' if one['pinned'] else ''}"
        )


app.add_typer(bench_cli.app, name="bench", help="Measure this machine, or with `bench serve` a server.")


@app.command(epilog="Example: localpaged export chats.json   Example: localpaged export --format markdown chats.zip")
def export(
    file: Annotated[Path | None, typer.Argument(help="Where to write; without it, to stdout.")] = None,
    format: Annotated[str, typer.Option(help="json, which can be imported again, or markdown (all: a zip).")] = "json",
    conversation: Annotated[int | None, typer.Option(help="Only this one, by its number.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    json_output: Json = False,
) -> None:
    """Write all conversations to a file, while no server runs."""
    from localpaged.transfer import run_export

    run_export(file, format, conversation, force, json_output)


@app.command("import", epilog="Example: localpaged import chats.json   Example: localpaged import chatgpt-export.zip")
def import_command(
    file: Annotated[Path, typer.Argument(help="An export of localpaged, ChatGPT (the zip too) or Open WebUI.")],
    json_output: Json = False,
) -> None:
    """Add the conversations of a file, while no server runs."""
    from localpaged.transfer import run_import

    run_import(file, json_output)


@app.command()
def doctor(json_output: Json = False) -> None:
    """Say what this machine can do: device, memory, versions, kernels, model, database."""
    from localpaged.doctor import examine

    findings = examine()
    if json_output:
        print(json.dumps([finding.as_dict() for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.mark} {finding.name:<24} {finding.text}")
    if any(not finding.good for finding in findings):
        raise typer.Exit(1)


def _show(values: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print(json.dumps(values))
        return
    width = max(map(len, values))
    for key, value in values.items():
        text = _human(value) if key == "bytes" and isinstance(value, int) else str(value)
        print(f"{key.replace('_', ' '):<{width}}  {text}")


def _human(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def _ago(moment: float) -> str:
    """How long ago a moment was that is given in seconds since 1970."""
    seconds = max(time.time() - moment, 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# typer carries a click of its own and exports only this one of its errors.
UsageError: type[Any] = typer.BadParameter.__bases__[0]


def main() -> None:
    """Run the command line: user errors are one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
        else:
            command = error.ctx.command_path.strip() if error.ctx else "localpaged"
            print(f"{command}: {error.format_message()} See `{command} --help`.", file=sys.stderr)
        sys.exit(2)
    except LocalpagedError as error:
        print(f"localpaged: {error}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("Stopped.", file=sys.stderr)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
