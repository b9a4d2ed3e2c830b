"""The curve of RePurpose's page: the example's net, cut over four workers. python docs/pictures/repurpose.py"""

import sys
from pathlib import Path

from armillary import repurpose

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

from cut_and_serve import accuracy, digits, trained  # noqa: E402  (it lies in examples/)


def main() -> None:
    pixels, labels = digits()
    model = trained(pixels[:1400], labels[:1400])
    batches = list(zip(pixels[:1400].split(50), labels[:1400].split(50), strict=True))
    shards = repurpose.cut(model, workers=4, batches=batches, measure=accuracy, drop=0.01)
    shards.plot(HERE / "repurpose.png")
    print(shards)


if __name__ == "__main__":
    main()
