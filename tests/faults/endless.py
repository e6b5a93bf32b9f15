"""Program of a rank in the fault tests: it trains until a file on the share tells it to end."""

# Each step says in a file that it was made.
STEPS = """
    import os, pathlib, time
    from mlflow_batchai.training import report
    share = pathlib.Path(os.environ["AZ_BATCHAI_MOUNT_ROOT"], "share")
    step = 0
    while not (share / "go").exists():
        report.log(step=step, loss=1.0 / (step + 1))
        (share / "step.new").write_text(str(step))
        (share / "step.new").rename(share / "step")
        step += 1
        time.sleep(0.05)
"""
DONE = """
    print("done", flush=True)
"""
