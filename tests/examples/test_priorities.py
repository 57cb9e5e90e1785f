from running import run_example


def test_the_urgent_request_overtakes_only_with_priorities(golden):
    result = run_example("priorities", "--model", golden / "llama_bias", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    fcfs, priority = result.stdout.split("priority:\n")
    lines = [line.strip() for line in fcfs.splitlines()[1:]]
    assert len(lines) == 7 and lines[-1].startswith("urgent")
    overtaken = [line.strip() for line in priority.splitlines()]
    assert len(overtaken) == 7
    (place,) = [i for i, line in enumerate(overtaken) if line.startswith("urgent")]
    assert place <= 2
