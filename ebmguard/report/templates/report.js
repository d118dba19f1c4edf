// The same step in all charts at once, with what each of them has there.
const figures = [...document.querySelectorAll(".plot")].map(figure => ({
  figure,
  svg: figure.querySelector("svg"),
  area: figure.querySelector(".target"),
  cursor: figure.querySelector(".cursor"),
  output: figure.querySelector("output"),
  data: JSON.parse(figure.querySelector("script").textContent),
}));
const size = (area, name) => area.getAttribute(name) * 1;
const short = value => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : +value.toPrecision(4);
function readout(run, step) {
  let at = run.step.findLastIndex(first => first <= step);
  if (at < 0) return "";
  const low = run.low[at], high = run.high[at];
  if (low === null) return "not finite";
  return low === high ? short(low) : `${short(low)} to ${short(high)}`;
}
function show(step) {
  for (const { area, cursor, output, data } of figures) {
    const x = size(area, "x") + size(area, "width") * step / data.last;
    cursor.setAttribute("transform", `translate(${x} 0)`);
    cursor.style.visibility = step === null ? "hidden" : "visible";
    output.replaceChildren();
    if (step === null) continue;
    output.append(`step ${Math.round(step).toLocaleString("en")}: `);
    data.runs.forEach((run, i) => {
      const value = document.createElement("b");
      value.className = `run${i}`;
      value.textContent = readout(run, step) + " ";
      output.append(value);
    });
  }
}
for (const { svg, area, data } of figures) {
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width - size(area, "x");
    const share = x / size(area, "width");
    show(share < 0 || share > 1 ? null : share * data.last);
  });
  svg.addEventListener("pointerleave", () => show(null));
}
// Text as large on a phone as on a wide screen, though the chart around it shrinks.
const sizes = new ResizeObserver(entries => entries.forEach(({ target, contentRect }) =>
  target.style.fontSize = `${11.5 * Math.max(0.8, target.viewBox.baseVal.width / contentRect.width)}px`));
figures.forEach(({ svg }) => sizes.observe(svg));
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => part.open = true));
