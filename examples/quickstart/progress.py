"""The display of rank 0: a live bar on a terminal, plain lines elsewhere (a log file, a pipe)."""

import collections
import math
import select
import sys
import textwrap
import time

import rich.box
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
PLAIN_LINE_EVERY_S = 10


def say(*text):
    console.print(Text(" ".join(text), style="dim"))
    sys.stdout.flush()


def confirm(question, patience_s=30):
    """Yes or no on a terminal (yes after ``patience_s`` seconds without an answer); yes where nobody can answer."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        say(question.split(" (no:")[0], "Nobody to ask: yes.")
        return True
    print(f"{question} [Y/n] ", end="", flush=True)
    try:
        ready, _, _ = select.select([sys.stdin], [], [], patience_s)
        answer = sys.stdin.readline().strip().lower() if ready else ""
    except OSError:  # the launcher's children may stand outside the terminal's foreground group
        ready, answer = [], ""
    if not ready:
        print("yes", flush=True)
    return answer not in ("n", "no")


def memory_text(memory):
    """``[bytes, ...]`` of the ranks as "512 + 498 MB"."""
    return " + ".join(f"{value / 1e6:.0f}" for value in memory) + " MB"


def duration(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class _Bar(RichProgress):
    """The bar, and a line of figures under it."""

    figures = "[dim]first step ...[/]"

    def get_renderables(self):
        yield self.make_tasks_table(self.tasks)
        yield Text.from_markup(self.figures)


class Progress:
    """Context manager around the training loop; ``report`` takes new figures, ``advance`` moves the bar."""

    def __init__(self, first, total, tokens_per_step, show):
        self.first = first
        self.total = total
        self.tokens_per_step = tokens_per_step
        self.show = show
        self.live = None
        self.figures = None
        self.marks = collections.deque([(time.time(), first)], maxlen=31)  # the last 30 steps give the speed
        self.next_line = 0.0

    def __enter__(self):
        if self.show and console.is_terminal:
            self.live = _Bar(
                TextColumn("[bold]step {task.completed:.0f}[/] of {task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:.0f} %  ETA [green]{task.fields[left]}[/]"),
                console=console,
                refresh_per_second=4,
                expand=True,
            )
            self.task = self.live.add_task("", total=self.total, completed=self.first, left="?")
            self.live.start()
        return self

    def __exit__(self, *exception):
        if self.live:
            self.live.stop()

    @property
    def tokens_per_second(self):
        (then, first), (now, last) = self.marks[0], self.marks[-1]
        return (last - first) * self.tokens_per_step / max(now - then, 1e-9)

    @property
    def eta_s(self):
        return (self.total - self.marks[-1][1]) * self.tokens_per_step / max(self.tokens_per_second, 1e-9)

    def report(self, step, loss, lr, memory):
        """``loss``: mean over the ranks; ``memory``: bytes, one number for each rank."""
        self.figures = (loss, lr, memory)

    def advance(self, step):
        self.marks.append((time.time(), step))
        if not self.show or not self.figures:
            return
        loss, lr, memory = self.figures
        rate = f"{self.tokens_per_second:,.0f} tokens/s"
        memory = memory_text(memory)
        left = duration(self.eta_s)
        if self.live:
            self.live.figures = f"loss [bold cyan]{loss:.3f}[/]   lr {lr:.1e}   {rate}   [dim]memory[/] {memory}"
            self.live.update(self.task, completed=step, left=left)
        elif time.time() >= self.next_line or step == self.total:
            self.next_line = time.time() + PLAIN_LINE_EVERY_S
            figures = f"loss {loss:.3f}  lr {lr:.1e}  {rate}  memory {memory}  ETA {left}"
            print(f"step {step:4d}/{self.total}  {figures}", flush=True)


def introduce(engine, corpus, shape, total, before, resumed, seconds):
    """Says what is about to be trained, on what, by whom."""
    about = corpus.about
    parameters = sum(p.numel() for p in engine.module.parameters())
    world = getattr(engine, "world_size", 1)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row(
        "text",
        f"{about['train']['bytes'] / 1e6:.1f} MB of Python source from {about['folder']}: {about['train']['files']} "
        f"files to learn from, {about['held_out']['files']} held out",
    )
    table.add_row(
        "tokens",
        f"{about['train']['tokens'] / 1e6:.2f} million of {corpus.tokenizer.vocab_size:,} kinds "
        f"({about['train']['bytes'] / about['train']['tokens']:.1f} bytes each), BPE trained on this machine",
    )
    table.add_row(
        "model",
        f"GPT in plain PyTorch, {parameters / 1e6:.1f} million parameters: {shape.layers} layers, "
        f"width {shape.width}, context {shape.context}",
    )
    dtype = str(next(engine.module.parameters()).dtype).replace("torch.", "")
    rows = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    table.add_row(
        "training",
        f"{world} processes x {rows} sequences, {dtype} on {engine.device}, "
        + (f"resumed at step {engine.global_steps}, on to {total}" if resumed else f"{total} steps"),
    )
    table.add_row(
        "held-out loss", f"{before:.2f} nats per token before training (guessing: {math.log(shape.vocab_size):.2f})"
    )
    table.add_row("set up in", f"{seconds:.1f} s")
    console.print(
        Panel(
            table,
            title="[bold]DeepSpeed quickstart[/]",
            title_align="left",
            box=rich.box.ROUNDED,
            border_style="cyan",
            expand=console.is_terminal,
        )
    )
    sys.stdout.flush()


def conclude(folder, state, sample, vocab_size, seconds):
    """Says what came of it."""
    before, after = state["before"], state["after"]
    losses = ("held-out loss  ", (f"{before:.3f}", "red"), " before  ", (f"{after:.3f}", "bold green"), " after")
    perplexity = f"perplexity {math.exp(before):,.0f} -> {math.exp(after):,.0f} of {vocab_size:,} tokens"
    console.print()
    console.print(Text.assemble(*losses, (f"   {perplexity}; trained for {duration(seconds)} minutes", "dim")))
    console.print("\na sample (temperature 0.8, not chosen):")
    if console.is_terminal:
        code = Syntax(sample, "python", theme="ansi_dark", background_color="default", word_wrap=True)
        console.print(Padding(code, (0, 0, 0, 2)))
    else:
        print(textwrap.indent(sample, "  "))
    console.print(f"\nkept in {folder}: loss.png, metrics.csv, sample.txt, checkpoints/")
    console.print("run the same command again to go on from here (--restart: begin anew)", style="dim")
    sys.stdout.flush()
