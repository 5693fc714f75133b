// The charts, and the line that says that the console does not answer. htmx does the rest.
"use strict";

(() => {
  const SHOWN = 900; // seconds
  const charts = {};
  const colors = () => getComputedStyle(document.documentElement);

  function chart(id, title, data, series, suffix) {
    const place = document.getElementById(id);
    if (!place) return;
    const known = charts[id];
    if (known && known.place === place) {
      known.plot.setData(data);
      return;
    }
    const style = colors();
    const axis = {
      stroke: style.getPropertyValue("--quiet"),
      grid: { stroke: style.getPropertyValue("--line"), width: 1 },
      ticks: { stroke: style.getPropertyValue("--line"), width: 1 },
    };
    const clock = (seconds, length) => new Date(seconds * 1000).toTimeString().slice(0, length);
    const now = () => Date.now() / 1000;
    const plot = new uPlot(
      {
        title,
        width: place.clientWidth || 300,
        height: 200,
        cursor: { drag: { x: false, y: false } },
        scales: { x: { range: () => [now() - SHOWN, now()] }, y: { range: (plot, low, high) => [0, Math.max(high || 0, 0.1) * 1.1] } },
        axes: [{ ...axis, space: 70, values: (plot, ticks) => ticks.map((tick) => clock(tick, 5)) }, { ...axis, size: 56, values: (plot, ticks) => ticks.map((tick) => `${tick}${suffix}`) }],
        series: [
          { value: (plot, at) => (at == null ? "" : clock(at, 8)) },
          ...series.map(([label, color]) => ({ label, stroke: style.getPropertyValue(color), width: 1.5, spanGaps: false })),
        ],
      },
      data,
      place,
    );
    charts[id] = { plot, place };
  }

  function draw() {
    const source = document.getElementById("rates-data");
    if (!source) return;
    const found = JSON.parse(source.dataset.series);
    const rates = found.units
      ? [found.time, found.transactions, found.units]
      : [found.time, found.transactions];
    const names = [["transactions", "--s1"], ["units", "--s3"]].slice(0, rates.length - 1);
    chart("chart-rate", "Per second", rates, names, "");
    if (found.p50) {
      const times = [found.time, found.p50, found.p99];
      chart("chart-time", "Milliseconds, from call to result", times, [["p50", "--s1"], ["p99", "--s4"]], "");
    }
  }

  function resize() {
    for (const { plot, place } of Object.values(charts)) {
      plot.setSize({ width: place.clientWidth, height: 200 });
    }
  }

  function redraw() {
    for (const [id, { plot }] of Object.entries(charts)) {
      plot.destroy();
      delete charts[id];
    }
    draw();
  }

  let answered = new Date();
  function answers(yes) {
    const line = document.getElementById("away");
    if (yes) answered = new Date();
    document.getElementById("away-since").textContent = answered.toLocaleTimeString();
    line.hidden = yes;
  }

  document.addEventListener("htmx:after:request", () => answers(true));
  document.addEventListener("htmx:error", () => answers(false));
  document.addEventListener("htmx:after:swap", () => {
    document.documentElement.dataset.swapped = "yes";
    draw();
  });
  window.addEventListener("resize", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  draw();
})();
