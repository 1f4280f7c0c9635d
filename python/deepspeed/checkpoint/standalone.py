"""The script that lies beside checkpoints and needs torch alone."""


def write_script(folder):
    open(f"{folder}/zero_to_fp32.py", "w").close()
