"""Runs a whole unittest suite and writes the ids of the tests that passed, one a line: verify.py TESTS REPORT

Run by the verifier in a sandbox of its own. The exit code is worth nothing as a verdict: a program under test can end the
process with any code it likes, but then the report is missing.
"""

import sys
import unittest


class Passed(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.ids.append(test.id())


tests, report = sys.argv[1:]
result = Passed()
unittest.defaultTestLoader.discover(tests, top_level_dir=".").run(result)
with open(report, "w") as file:
    file.writelines(f"{id_}\n" for id_ in sorted(result.ids))
