"""`localpaged bench`: this machine's engine by default, or `serve`, a server behind OpenAI's API."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

ENGINE = "engine"


class BenchGroup(TyperGroup):
    """What is no name of a command is a work for the engine: `localpaged bench 4:256:32`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [ENGINE, *args]
        return super().parse_args(ctx, args)


class EngineCommand(TyperCommand):
    """The default one: it is called without its name, and shows itself so."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return super().make_context(None, args, parent=parent, **extra)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path.strip(), " ".join(self.collect_usage_pieces(ctx)))


Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")]
app = typer.Typer(cls=BenchGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
Model = Annotated[str | None, typer.Option("--model", "-m", help="Path, or a name of `localpaged list`.")]


@app.command(
    ENGINE,
    cls=EngineCommand,
    epilog="Example: localpaged bench --work 4:256:32 --work 8:2000:32 --json   Of a server: localpaged bench serve",
)
def engine(
    more: Annotated[list[str] | None, typer.Argument(metavar="[WORK]...", help="More works, as after --work.")] = None,
    work: Annotated[
        list[str] | None, typer.Option(help="n:context:steps: prefill context tokens, decode steps for n candidates.")
    ] = None,
    model: Model = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens a KV block, 8 to 128 (16).")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Memory for KV, such as 2G.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32; on a card bfloat16, float16.")] = None,
    json_output: Json = False,
) -> None:
    """Measure prefill and decode on this machine."""
    from localpaged.bench import DEFAULT_WORKS, run_bench
    from localpaged.config import load_settings

    settings = load_settings(model=model, block_size=block_size, kv_cache_memory=kv_cache_memory, dtype=dtype)
    run_bench([*(work or []), *(more or [])] or DEFAULT_WORKS, settings, json_output)


@app.command(
    epilog="Example: localpaged bench serve --num-requests 40 --max-concurrency 4 -n 4 --plot serve.svg   "
    "Example: localpaged bench serve --work azure --speed 0.2 --ttft-slo 2000 --itl-slo 200"
)
def serve(
    base_url: Annotated[str, typer.Option(help="The server's OpenAI API.")] = "http://127.0.0.1:7860/v1",
    model: Annotated[str | None, typer.Option("--model", "-m", help="Name at the server (its first one).")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key (else OPENAI_API_KEY).")] = None,
    work: Annotated[str, typer.Option(help="mt-bench: two-turn questions; azure: a trace's lengths.")] = "mt-bench",
    num_requests: Annotated[int, typer.Option("--num-requests", "--num-prompts", help="Requests, each turn one.")] = 80,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with turns, in place of MT-bench.")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens.")] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Arrivals a second, Poisson (the trace's own times; mt-bench: at once).")
    ] = None,
    speed: Annotated[float, typer.Option(help="So many times as fast as the trace.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", "--concurrency", help="Requests at once (no limit).")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Answers to each request.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer (256; azure: the trace's).")] = None,
    max_input_tokens: Annotated[int | None, typer.Option(help="Cut the trace's prompts to this.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers as long as asked for, if it can.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Sampling (the server's own).")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and made-up prompts.")] = 0,
    ttft_slo: Annotated[
        float | None, typer.Option(help="Goodput: first token of all answers within so many ms.")
    ] = None,
    itl_slo: Annotated[float | None, typer.Option(help="Goodput: mean ms from token to token, at most.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a piece of an answer.")] = 600.0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of it: FILE.svg.")] = None,
    json_output: Json = False,
) -> None:
    """Measure any server with OpenAI's API: time to first token, inter-token latency, goodput, percentiles."""
    from localpaged.bench_serve import ServeBench, run_bench_serve
    from localpaged.load.replay import Asking
    from localpaged.load.workload import PROMPTS, TRACE

    if max_tokens is None and work == "mt-bench":
        max_tokens = 256
    asking = Asking(model, n, max_tokens, temperature, ignore_eos, max_concurrency, seed)
    bench = ServeBench(
        base_url=base_url,
        work=work,
        num_requests=num_requests,
        asking=asking,
        api_key_file=api_key_file,
        trace=trace or TRACE,
        prompts=prompts or PROMPTS,
        request_rate=request_rate,
        speed=speed,
        max_input_tokens=max_input_tokens,
        timeout_s=timeout,
        ttft_slo_ms=ttft_slo,
        itl_slo_ms=itl_slo,
        plot=plot,
    )
    run_bench_serve(bench, json_output)
