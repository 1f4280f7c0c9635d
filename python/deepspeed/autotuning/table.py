"""The summary of a search as text."""

from deepspeed.host.texts import table

_COLUMNS = ("experiment", "stage", "mbs", "gas", "result")


def summary(tuner, time_taken):
    """The best of each space, each experiment with its metric or the reason of its failure, and the published last
    line."""
    metric, rows = tuner.metric(), [row for rows in tuner.records.values() for row in rows]
    best = tuner.get_best_space_records()
    spaces = [
        (name, str(len(tuner.records[name])), f"{row[1]:g}", row[0]["name"])
        for name, row in best.items()
        if name != "global"
    ]
    lines = table([("tuning space", "experiments", f"best {metric}", "best experiment"), *spaces])
    failed = sorted((row for row in rows if row[1] is None), key=lambda row: row[2])
    good = sorted((row for row in rows if row[1] is not None), key=lambda row: -tuner.goodness(row[1]))
    cells = []
    for exp, value, _ in (*good, *failed):
        config = exp["ds_config"]
        result = f"{value:g}" if value is not None else exp["reason"]
        zero = config.get("zero_optimization", {})
        cells.append(
            (
                exp["name"],
                *(
                    str(one)
                    for one in (
                        zero.get("stage"),
                        config["train_micro_batch_size_per_gpu"],
                        config.get("gradient_accumulation_steps"),
                    )
                ),
                result,
            )
        )
    lines += ["", *table([(*_COLUMNS[:-1], metric), *cells])]
    if tuner.skipped:
        lines += ["", *table([("not run", "why"), *sorted(tuner.skipped.items())])]
    if "global" in best:
        exp, value, _ = best["global"]
        lines += ["", f"The best is {exp['name']}: {metric} {value:g}."]
    lines.append(f"Tuning completed in {time_taken}. Total number of experiments: {len(rows)}.")
    return "\n".join(lines) + "\n"
