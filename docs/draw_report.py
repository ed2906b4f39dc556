"""Draw the picture of a run's page in docs/formats.md from a real run: `python docs/draw_report.py`. Needs chromium."""

import subprocess
import tempfile
from pathlib import Path

SIZE = "820,1180"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        subprocess.run(["replay", "--max-inputs", "12", "--quiet", "--log-folder", folder], check=True)
        (run,) = logs.iterdir()
        subprocess.run(["replay", "report", str(run), "--to", str(logs / "page.html")], check=True)
        picture = Path(__file__).parent / "report.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}"]
        page = (logs / "page.html").as_uri()
        subprocess.run(["chromium", *options, f"--screenshot={picture}", page], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
