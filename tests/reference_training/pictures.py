"""What holds of every picture, whatever it shows."""

from __future__ import annotations

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def assert_no_text_on_text(figure: Figure) -> None:
    """No text of the picture lies on another, or leaves the picture."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # which places everything
    parts = [figure, *figure.subfigs]
    written = [text for part in parts for text in part.texts if text.get_text()]
    for axes in [axes for axes in figure.axes if axes.axison]:
        written += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        labels = (*axes.get_xticklabels(), *axes.get_yticklabels())
        inside = axes.get_window_extent(renderer).padded(2)
        for label in labels:
            x, y = label.get_transform().transform(label.get_position())
            if inside.x0 <= x <= inside.x1 or inside.y0 <= y <= inside.y1:
                written.append(label)
    legends = [axes.get_legend() for axes in figure.axes]
    legends += [legend for part in parts for legend in part.legends]
    for legend in filter(None, legends):
        written += legend.get_texts()
    shown = [(text, text.get_window_extent(renderer)) for text in written if text.get_text()]
    shown = [(text, box) for text, box in shown if box.width]
    for text, box in shown:
        outside = box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1
        assert not outside, f"{text.get_text()!r} leaves the picture"
    for (a, one), (b, two) in itertools.combinations(shown, 2):
        assert not one.overlaps(two), f"{a.get_text()!r} lies on {b.get_text()!r}"
