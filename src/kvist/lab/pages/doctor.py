"""A diagnosis on a page. Owns the order; the words are the doctor's."""

from __future__ import annotations

from kvist.lab.doctor.examine import Diagnosis
from kvist.lab.doctor.thresholds import Level
from kvist.lab.pages.page import Page


def add_diagnosis(page: Page, target: str, answer: Diagnosis) -> None:
    """Add a section about one target of the doctor."""
    page.heading(f"Findings: {target}")
    for fact in answer.facts:
        page.text(fact, "faint")
    if answer.figures:
        rows: list[list[str | tuple[str, str]]] = [
            [
                figure.title,
                (figure.text(figure.value), figure.remark),
                figure.text(figure.limit.warning),
                figure.text(figure.limit.bad),
                "" if figure.level is Level.UNKNOWN else figure.level.value,
            ]
            for figure in answer.figures
        ]
        page.table("key figures", ("", "now", "warning", "bad", "level"), rows)
    if answer.prefix_lengths:
        most = max(1, *(count for _, count in answer.prefix_lengths))
        page.table(
            "longest prefix shared with another prompt",
            ("tokens, below", "prompts"),
            [[f"{below:,}", f"{count:,}"] for below, count in answer.prefix_lengths],
            [[None, count / most] for _, count in answer.prefix_lengths],
        )
    if not answer.findings:
        page.text("Nothing found.", "ok")
    for number, finding in enumerate(answer.findings, 1):
        rows_of = (
            ("seen", finding.evidence),
            ("likely", finding.cause),
            ("do", finding.remedy),
        )
        page.finding(number, finding.symptom.title, rows_of)
