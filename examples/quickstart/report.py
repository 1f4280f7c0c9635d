"""Files that a run writes besides its checkpoint: metrics.csv, sample.txt and loss.png."""

import csv
import os
import shutil

COLUMNS = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s")


def remove(folder):
    """Removes what an earlier run left in ``folder``, and nothing else that may lie there."""
    shutil.rmtree(os.path.join(folder, "checkpoints"), ignore_errors=True)
    for name in ("metrics.csv", "sample.txt", "loss.png"):
        if os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))


def write(folder, state, sample):
    """``state``: ``rows`` (lists in the order of COLUMNS), ``before`` and ``after`` (held-out losses)."""
    with open(os.path.join(folder, "metrics.csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([int(row[0]), int(row[1])] + [f"{value:.6g}" for value in row[2:]] for row in state["rows"])
    with open(os.path.join(folder, "sample.txt"), "w", encoding="utf-8") as file:
        file.write(sample + "\n")
    plot(os.path.join(folder, "loss.png"), state)


def plot(path, state):
    """Training loss over tokens, with the held-out loss at both ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [row[1] / 1e3 for row in state["rows"]]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    axes.plot(tokens, [row[2] for row in state["rows"]], color="#2563eb", linewidth=1.4, label="training")
    ends = [(0, state["before"]), (tokens[-1], state["after"])]
    axes.scatter(*zip(*ends), color="#dc2626", zorder=3, label="held-out files")
    for x, y in ends:
        axes.annotate(
            f"{y:.2f}", (x, y), textcoords="offset points", xytext=(-6 if x else 8, 8), ha="right" if x else "left"
        )
    axes.set_xlabel("thousand tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("A 10M-parameter GPT reads Python's standard library", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
