"""A picture of who was served how much: cumulative service of each client over the run."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from sim.clock import NS_PER_S
from sim.metrics.fairness import cumulative_service
from sim.report.series import NUM_BINS
from sim.report.style import clipped, finish, house_style, line_look, panels, plain_numbers, run_line, shade_unmeasured
from sim.results import Results


@house_style()
def service(results: Results) -> Figure | None:
    """Service of each client (request class) from the run's start on. None for a single client or an idle run.

    Lines that stay parallel get the same share; one that falls behind is served less.
    """
    names, requests = results.facts.class_names, results.tables.requests
    if len(names) < 2 or len(results.tables.iterations["lane"]) == 0:
        return None
    run, window = results.run_window, results.window
    times_ns = np.linspace(run.start_ns, run.end_ns, NUM_BINS).astype(np.int64)
    figure, (panel,) = panels([3.4])
    for index, name in enumerate(names):
        path = cumulative_service(requests, results.tokens, requests["class_index"] == index, times_ns)
        panel.plot(times_ns / NS_PER_S, path, label=clipped(name), **line_look(index))
    panel.set_xlabel("time (s)")
    panel.set_ylabel("service so far\n(prompt + 2 × output tokens)")
    panel.set_ylim(bottom=0)
    plain_numbers(panel.yaxis)
    run_s = (run.start_ns / NS_PER_S, run.end_ns / NS_PER_S)
    panel.set_xlim(*run_s)
    shade_unmeasured([panel], run_s, (window.start_ns / NS_PER_S, window.end_ns / NS_PER_S))
    fairness = results.summary()["fairness"]
    jain = "–" if fairness["jain_index"] is None else f"{fairness['jain_index']:.3f}"
    finish(figure, "Service per client", run_line(results.facts.provenance, f"Jain index {jain}"))
    return figure
