"""What Chinese answers write around a number, in LaTeX: units, phrases and numerals, as far as they are known."""

# ruff: noqa: RUF001 (these are tables of letters that look alike)

import re

# What is left out: phrases before an answer, and measure words.
_LEFT_OUT = (
    "最终答案是", "最终答案为", "正确答案是", "正确答案为", "答案应为", "答案是", "答案为", "答案选", "答案",
    "因此", "所以", "故选", "应选", "选择", "选项", "选", "故", "答", "解", "共", "项", "个", "只", "本",
    "条", "张", "支", "种",
)  # fmt: skip
_WORDS = dict.fromkeys(_LEFT_OUT, "") | {
    "平方厘米": r"\text{ cm^2}", "平方米": r"\text{ m^2}", "立方厘米": r"\text{ cm^3}",
    "立方米": r"\text{ m^3}", "千米": r"\text{ km}", "公里": r"\text{ km}", "厘米": r"\text{ cm}",
    "毫米": r"\text{ mm}", "米": r"\text{ m}", "千克": r"\text{ kg}", "公斤": r"\text{ kg}",
    "克": r"\text{ g}", "吨": r"\text{ tonnes}", "毫升": r"\text{ ml}", "升": r"\text{ l}",
    "小时": r"\text{ hours}", "分钟": r"\text{ minutes}", "秒": r"\text{ seconds}", "天": r"\text{ days}",
    "年": r"\text{ years}", "美元": r"\text{ dollars}", "欧元": r"\text{ euros}", "人民币": r"\text{ yuan}",
    "元": r"\text{ yuan}", "平方单位": r"\text{ square units}", "单位": r"\text{ units}",
    "是的": r"\text{yes}", "个人": r"\text{ people}", "人": r"\text{ people}", "次": r"\text{ times}",
    "岁": r"\text{ years old}", "度": r"^\circ ", "无解": r"\text{no solution}",
    "不存在": r"\text{does not exist}", "不是": r"\text{no}", "是": r"\text{yes}", "否": r"\text{no}",
    "正确": r"\text{true}", "错误": r"\text{false}", "或者": r"\text{ or }", "或": r"\text{ or }",
    "和": r"\text{ and }", "且": r"\text{ and }",
}  # fmt: skip
# The longest first, so that `平方厘米` is no `米`.
_WORD = re.compile("|".join(sorted(_WORDS, key=len, reverse=True)))
_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_POWERS = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
_KILO = "(?![米克瓦])"  # `6千米` are 6 km
_NUMERAL = f"(?:千{_KILO}|[零〇一二两三四五六七八九十百万亿])"
_SPELLED = re.compile(rf"(负)?(?:({_NUMERAL}+)分之({_NUMERAL}+)|({_NUMERAL}+))")
_SCALED = re.compile(rf"(?<![0-9.])([0-9]+(?:\.[0-9]+)?)\s*((?:千{_KILO}|[万亿百])+)")
# What names the value behind it: `最大值为 8`, `面积是 8`.
_NAMED = re.compile(
    "^(?:(?:因此|所以|故|则|答|解)[:,]?)?(?:[其它]的?)?"
    "(?:最大值|最小值|极大值|极小值|取值|数值|值|结果|面积|体积|周长|表面积|长度|长|宽|高|半径|直径|距离|概率|总数|个数|人数|种数|总和|和|差|积|商|余数|公差|公比|斜率|共有|一共有|共|有)?"
    r"(?:等于|为|是|有)\s*(?=[-+]?[0-9\\$])"
)
_LETTERS = re.compile(r"[\u3007\u4e00-\u9fff]")


def translated(text: str) -> str:
    """The text with the Chinese words that are known in LaTeX; the others stay, and make another answer."""
    if not _LETTERS.search(text):
        return text
    text = re.sub(r"\\text\{([^{}]*[\u4e00-\u9fff][^{}]*)\}", r" \1 ", text)
    text = _NAMED.sub("", text.strip())
    text = _SCALED.sub(_multiplied, text)
    text = _SPELLED.sub(_number, text)
    text = _WORD.sub(lambda word: _WORDS[word[0]], text)
    return re.sub(r"^\s*[::,,]\s*", "", text)


def _multiplied(match: re.Match[str]) -> str:
    whole, _, decimals = match[1].partition(".")
    power = 1
    for character in match[2][:4]:
        power *= _POWERS[character]
    value = int(whole + decimals) * power
    places = 10 ** len(decimals)
    return str(value // places) if value % places == 0 else match[0]


def _number(match: re.Match[str]) -> str:
    sign = "-" if match[1] else ""
    parts = [_value(part) for part in match.groups()[1:] if part]
    if None in parts or max(map(len, filter(None, match.groups()))) > 20:
        return match[0]
    return sign + (str(parts[0]) if len(parts) == 1 else rf"\frac{{{parts[1]}}}{{{parts[0]}}}")


def _value(text: str) -> int | None:
    """The value of a numeral; None for one that is not built by the rules."""
    if all(character in _DIGITS for character in text):
        return int("".join(str(_DIGITS[character]) for character in text))
    total = group = digit = 0
    for character in text:
        if character in _DIGITS:
            digit = _DIGITS[character]
        elif _POWERS[character] >= 10**4:
            total, group, digit = (total + group + digit) * _POWERS[character], 0, 0
        else:
            group, digit = group + (digit or 1) * _POWERS[character], 0
    return total + group + digit
