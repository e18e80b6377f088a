"""Help texts of the command lines."""

import argparse


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds "(default: …)" to the help of each option that has a default value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)
