// Charts with uPlot in place of the drawings of the server: axes, values under the pointer, new points without a reload.
(() => {
  const REFRESH_MS = 5000;
  const HEIGHT = 160;
  const SCALES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const SPANS = [[86400e3, "d"], [3600e3, "h"], [60e3, "min"], [1e3, "s"], [1, "ms"], [1e-3, "µs"]];
  const digits = (value) => String(Number(value.toPrecision(3)));
  const short = (value) => {
    const [size, unit] = SCALES.find(([least]) => Math.abs(value) >= least) ?? [1, ""];
    return digits(value / size) + (unit && " " + unit);
  };
  const span = (ms) => {
    if (!ms) return "0";
    const [size, unit] = SPANS.find(([least]) => ms >= least) ?? SPANS.at(-1);
    return digits(ms / size) + " " + unit;
  };
  const TEXTS = { rate: (value) => short(value) + "/s", count: short, ms: span };
  const charts = new Map(); // by element: { plot, names }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const COLOURS = ["--chart-1", "--chart-2"];

  const options = (element, names) => {
    const text = TEXTS[element.dataset.unit];
    const line = { stroke: () => css("--chart-text"), grid: { stroke: () => css("--chart-grid"), width: 1 }, ticks: { show: false } };
    return {
      width: element.clientWidth,
      height: HEIGHT,
      cursor: { y: false, drag: { x: false, y: false } },
      legend: { live: true },
      padding: [8, 8, 0, 0],
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...line, space: 70, size: 28, values: [
          [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 0],
          [3600, "{HH}:{mm}", null, null, null, null, null, null, 0],
          [60, "{HH}:{mm}", null, null, null, null, null, null, 0],
          [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 0],
        ] },
        { ...line, size: 62, values: (_, ticks) => ticks.map(text) },
      ],
      series: [
        { label: "Time (UTC)", value: "{YYYY}-{MM}-{DD} {HH}:{mm}:{ss}" },
        ...names.map(([, label], index) => ({
          label, width: 2, stroke: () => css(COLOURS[index]), points: { show: false }, spanGaps: false,
          value: (_, value) => (value === null || value === undefined ? "–" : text(value)),
        })),
      ],
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC"),
    };
  };

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = charts.get(target);
      if (plot && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: HEIGHT });
    }
  });

  const show = (element, history) => {
    const names = JSON.parse(element.dataset.names);
    const data = [history.times_s, ...names.map(([field]) => history[field])];
    const shown = charts.get(element);
    if (shown) {
      shown.setData(data);
      return;
    }
    element.replaceChildren();
    charts.set(element, new uPlot(options(element, names), data, element));
    sizes.observe(element);
  };

  // Charts of one page have one address: it is asked for once.
  const refresh = async () => {
    const elements = [...document.querySelectorAll(".chart")];
    for (const element of charts.keys()) {
      if (!element.isConnected) {
        sizes.unobserve(element);
        charts.get(element).destroy();
        charts.delete(element);
      }
    }
    const answers = new Map();
    for (const address of new Set(elements.map((element) => element.dataset.from))) {
      try {
        const answer = await fetch(address, { headers: { Accept: "application/json" } });
        if (answer.ok) answers.set(address, await answer.json());
      } catch {
        // nsqadmin does not answer: the page says so, and the charts stay as they are
      }
    }
    for (const element of elements) {
      const history = answers.get(element.dataset.from);
      if (history && history.is_recorded && history.times_s.length) show(element, history);
    }
  };

  const redraw = () => charts.forEach((plot) => plot.redraw(false));
  document.addEventListener("themed", redraw);
  setInterval(() => !document.hidden && document.getElementById("live").getAttribute("aria-pressed") === "true" && refresh(), REFRESH_MS);
  refresh();
})();
