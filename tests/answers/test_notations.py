# ruff: noqa: E501 (cases are easier to read in rows)
"""One answer in several notations, and wrong answers that look like it."""

import pytest

from tests.answers.test_judge import outcome

RIGHT = {
    "decimals that repeat": [
        (r"\frac{1}{3}", r"0.\bar{3}"), (r"\frac{1}{3}", r"0.\bar 3"), (r"\frac{1}{3}", r"0.\overline 3"), (r"\frac{1}{3}", r"0.\dot{3}"),
        (r"\frac{1}{3}", "0.333..."), (r"\frac{1}{3}", r"0.333\ldots"), (r"\frac{1}{3}", r"0.333\dots"), (r"\frac{1}{3}", r"0.333\cdots"),
        (r"\frac{1}{3}", "0.3333\u2026"), (r"-\frac{1}{3}", r"-0.\bar{3}"), (r"1\frac{1}{3}", r"1.\overline{3}"), (r"0.\bar{3}", r"0.\overline{3}"),
        (r"0.1\overline{6}", r"\frac16"), (r"33.\bar{3}\%", r"33\frac13\%"), (r"33.\overline{3}\%", r"\frac{1}{3}"), (r"x=0.\bar{3}", r"\frac13"),
        (r"\frac{1}{3}", r"x = 0.\overline{3}"), (r"\left(\frac13,\frac23\right)", r"(0.\bar3,0.\bar6)"),
        (r"\frac{1}{3}, \frac{2}{3}", r"0.\overline{3}, 0.\overline{6}"), (r"\frac{1}{3}", r"0.\overline{3}."),
        (r"\frac{1}{3}", r"0.\overline{\,3\,}"), (r"\frac{1}{3}", r"0.\mathrm{\overline{3}}"), (r"\frac{10}{3}\pi", r"3.\overline{3}\pi"),
        (r"0.\overline{3}", "0.3333333333"), (r"0.\overline{3}\text{ cm}", r"\frac13\text{ cm}"), (r"\frac23", r"\sqrt{0.\overline{4}}"),
        ("1", r"0.\overline{3}\cdot 3"), (r"\frac13", r"0.\overline{12}+0.\overline{21}"), (r"\frac19", r"(0.\overline{3})^2"),
        ("e", "2.718281828..."), (r"\sqrt2", r"1.41421356\ldots"), ("P(3)=12", "12"),
    ],
    "digits in groups": [
        (r"\frac{30000}{\pi}", r"\frac{30,000}{\pi}"), (r"\sqrt{10,000}", "100"), (r"\frac{1}{1,000}", "0.001"), ("x = 12,000", "12000"),
        ("12000", "x=12,000"), ("12000", r"\text{12,000}"), ("1,000,000", "10^6"), (r"\binom{1,000}{2}", "499500"),
        (r"20,000\text{ m}^2", r"20000\text{ m}^2"), (r"\left|1,000\right|", "1000"), (r"\log 1,000", r"\log 1000"), (r"\log_{10} 1,000", "3"),
        (r"\sqrt[3]{1,000,000}", "100"), (r"\frac{30,000}{\pi}", r"\dfrac{30\,000}{\pi}"), (r"30,000 / \pi", r"\frac{30000}{\pi}"),
        ("{20,000}", "20000"), (r"\mathbf{1,000}", "1000"), (r"x \le 1,000", r"x \le 1000"), (r"(1000,\infty)", "x > 1,000"),
        (r"\lfloor 1,234\rfloor", "1234"), (r"\begin{pmatrix}1,234\\5\end{pmatrix}", r"\begin{pmatrix}1234\\5\end{pmatrix}"),
        (r"\{100,200\}", r"\{200,100\}"), ("2,500,000", "2.5e6"), (r"2.5\times 10^6", "2,500,000"), (r"2,500 \text{ and } 3,500", "2500, 3500"),
    ],
    "lists in words": [
        ("17, 45, and 80", r"17, 45, \text{ and } 80"), ("3, 5, 7", "3,5, and 7"), ("3, 5, 7", r"3, 5, \textbf{and } 7"),
        ("3, 5, 7", r"3, 5, \mbox{ and } 7"), ("17,45,80", "80, 45, and 17"), ("x=3 or x=5", "3, 5"), ("x=3, x=5", r"x=3 \text{ or } x=5"),
        ("3 and -5", r"-5 \text{ and } 3"), (r"\frac12 and \frac13", r"\frac12, \frac13"),
        (r"\frac{1}{2}, \frac{1}{3}", r"\frac{1}{2}\text{ and }\frac{1}{3}"), (r"\pm\sqrt{2}", r"\sqrt{2} \text{ and } -\sqrt{2}"),
        ("(1,2), (3,4)", r"(1,2) \text{ and } (3,4)"), (r"3\text{ cm and }5\text{ cm}", "3, 5"), ("2,3", r"2\quad\text{and}\quad 3"),
        (r"0,\pi", "0 and pi"), ("3, 5, 7", r"3, 5, \textrm{ and } 7"), ("3, 5, 7", r"3, 5, \operatorname{and} 7"),
        ("3, 5, 7", r"3, 5, \textit{and } 7"), ("blue, red", r"\text{red and blue}"), ("A, C", r"\textbf{(A) and (C)}"), ("2, 3", r"x\in\{2,3\}"),
        ("x^2+1 and x-1", "x-1, x^2+1"), (r"\sin x and \cos x", r"\sin x, \cos x"),
    ],
    "words in upright type": [
        (r"\text{odd}", "odd"), ("odd", r"\text{odd}"), ("odd", r"\text{odd}."), (r"\text{(A)}", "A"), (r"\text{the odd numbers}", "odd numbers"),
        (r"\text{Sin}", r"\text{sin}"), (r"\text{odd, even}", "odd, even"), (r"\text{Friday}", r"\emph{Friday}"), (r"{\text{odd}}", "odd"),
        (r"\boxed{\text{odd}}", "odd"), (r"\text{Odd}", r"\mathit{odd}"), (r"\text{odd}", r"\textnormal{odd}"), (r"\text{odd}", r"\textsf{odd}"),
        (r"\text{odd}", r"\hbox{odd}"), (r"\text{even}", r"{\rm even}"), (r"\text{even}", r"\bf even"), ("odd", r"\underline{\text{odd}}"),
        ("odd", r"\textsc{odd}"), ("odd", r"\textcolor{red}{\text{odd}}"), ("odd", r"\fbox{odd}"), ("odd", r"\mathsf{odd}"),
        ("odd", r"\large\text{odd}"), (r"2\frac{1}{2}\text{ hours}", "2.5 hours"), (r"\text{June 20}", "June 20"),
        ("6:30 PM", r"\text{6:30 PM}"), (r"\text{12 noon}", "12 noon"), ("3rd", r"\text{3rd}"), (r"\text{Monday, June 3}", "monday, June 3"),
    ],
    "named quantities": [
        (r"\frac{KL}{ML}=\frac{1}{\sqrt{7}}", r"\frac{1}{\sqrt{7}}"), (r"\frac{1}{\sqrt{7}}", r"\frac{KL}{ML}=\frac{1}{\sqrt{7}}"),
        (r"\frac{KL}{ML}=\frac{1}{\sqrt{7}}", r"\frac{\sqrt7}{7}"), (r"\frac{KL}{ML}=\frac{\sqrt{7}}{7}", r"\frac{KL}{ML}=\frac{1}{\sqrt{7}}"),
        (r"\frac{AB}{CD}=\frac{2}{3}", r"\frac23"), ("2:3", "AB:CD=2:3"), (r"60^\circ", r"\angle A = 60^\circ"), ("60", r"\angle ABC=60^\circ"),
        (r"m\angle A=60^\circ", "60"), (r"P(A\mid B)=\frac13", r"\frac13"), (r"P(A \cap B)=\frac13", r"\frac13"), ("a_5=7", "7"), ("7", "a_{5}=7"),
        ("7", "[ABC]=7"), ("7", r"\triangle ABC=7"), ("7", r"\text{Area}(ABC)=7"), ("7", "V = 3+4 = 7"), (r"12\pi", r"V=\pi r^2 h=12\pi"),
        ("7", r"\lambda=7"), ("7", r"\alpha=7"), ("7", r"\det(A)=7"), ("7", r"\gcd(a,b)=7"), (r"\frac{1}{2}", r"\sin\theta=\frac12"),
        (r"\frac12", r"\tan \theta = \frac{1}{2}"), (r"\cos(A)=\frac12", r"\frac12"), ("7", r"\text{The answer is }x=7"), ("(2,3)", "(x,y)=(2,3)"),
        ("2,3", "x_1=2, x_2=3"), (r"\vec{v}=(1,2)", "(1,2)"), ("7", r"\mathbb{E}[X]=7"), ("7", r"\overrightarrow{AB}=7"), ("7", r"\boxed{x=7}"),
        ("7", r"r=7\text{ cm}"), (r"\text{Area}=12", "Area=12"), (r"\frac{a}{b}=x", r"\frac ab"), ("55", "F_{10}=55"), ("7", r"P(A\cup B)=7"),
        ("7", r"\mu=7"), ("7", r"x_{\max}=7"),
    ],
    "choices with their text": [
        ("B", r"\textbf{(B)}\ 24"), (r"\text{(E)}", r"\text{(E)}\ 24"),
    ],
    "names of functions": [
        ("7", "f(x)=7"), ("7", "g(x,y)=7"), ("7", "f_1(x+1)=7"), ("7", r"y(2\pi)=7"), ("7", r"y(\frac{\pi}{2})=7"), ("7", r"\text{Var}(2X+1)=7"),
        ("7", r"\varphi(n-1)=7"), ("7", r"\sigma(2n)=7"), ("f(x+1)=x^2", "x^2"), ("x(x+1)=12", "x^2+x-12=0"),
        (r"\frac12", r"\frac{P(A)}{P(B)}=\frac12"), ("x(x+1)=12", "12=x^2+x"),
    ],
    "sums and products of names": [
        ("17", "a+b+c=17"), ("17", "b-a=17"), ("17", r"m\cdot n=17"), ("17", r"\alpha+\beta=17"), ("17", "a_{1}+a_{2}+a_{3}=17"),
        ("17", "m+n=10+7=17"), ("17", "m+n+p=17.0"), (r"\frac{17}{3}", r"x+y=\frac{17}{3}"), (r"3\sqrt{2}", r"a+b=\sqrt{18}"),
        (r"12\pi", r"R+r=12\pi"), (r"17\text{ cm}", r"a+b=17\text{ cm}"), ("3,5", "x+y=3, xy=5"), ("17", r"\boxed{m+n=17}"),
    ],
    "phrases before the answer": [
        (r"\frac38", r"\text{The probability is } \frac38"), (r"2\sqrt{13}", r"\text{Therefore, } AB = 2\sqrt{13}"),
        (r"\text{Yes}", r"\text{The answer is yes.}"),
    ],
    "radians": [
        (r"45^\circ", r"\frac{\pi}{4}\text{ rad}"), (r"\frac{\pi}{4}\text{ radians}", r"45^\circ"),
    ],
    "numbers with a base": [
        ("2102_{3}", "(2102)_3"),
    ],
    "functions of angles, sizes of numbers": [
        (r"\sin 2\alpha=\frac{24}{25}", r"\frac{24}{25}"), (r"\frac12", r"\cos(\alpha+\beta)=\frac12"), (r"\frac14", r"\sin^2\theta=\frac14"),
        ("5", "|z_1+z_2|=5"),
    ],
    "references that name a sum": [
        ("m+n=113", "113"), (r"mn=\frac{3}{4}", "0.75"),
    ],
    "phrases without a verb": [
        (r"\frac16", r"\text{Probability: }\frac16"),
    ],
    "infinitely many": [
        (r"\text{infinitely many}", r"\text{Infinitely many solutions}"),
    ],
}  # fmt: skip

WRONG = {
    "decimals that repeat": [
        (r"\frac{1}{3}", "0.3"), (r"\frac{1}{3}", r"0.\overline{34}"), (r"\frac{1}{3}", r"0.\bar{2}"), (r"\frac13", r"0.0\overline{3}"),
        (r"\frac13", "0.0(3)"), (r"\frac{1}{7}", r"0.\overline{142856}"), (r"\frac17", r"0.\dot{1}4285\dot{6}"), (r"\frac{3}{11}", r"0.2\dot{7}"),
        (r"\frac{3}{11}", "0.2(7)"), (r"\frac{3}{11}", r"0.2\overline{7}"), (r"\frac{5}{6}", r"0.\overline{83}"),
        (r"\frac{5}{6}", r"0.\dot{8}\dot{3}"), (r"\frac56", "0.(83)"), ("0.9", "0.3(3)"), ("0.9", "0.(9)"), ("0", "0.(3)"), ("1.5", "0.5(3)"),
        (r"0.\overline{45}", r"0.\overline{54}"), (r"0.\overline{45}", "0.45"), (r"0.\overline{45}", r"0.4\overline{5}"), ("0.3", r"0.\overline{3}"),
        ("3", r"\overline{3}"), ("3", r"\bar{3}"), ("3", r"\dot{3}"), ("1", r"0.\overline{8}"), ("0.123", "0.123..."), (r"\frac13", "0.32..."),
        (r"\frac{1}{3}", "0.3..."), (r"\frac{1}{3}", "0.34..."), ("3.14", "3.14..."), (r"\pi", "3.14..."), (r"\frac{22}{7}", "3.14..."),
        (r"\frac{41}{333}", "0.123..."), (r"\frac{157}{50}", "3.14..."), (r"\frac{1}{3}", "-0.(3)"), (r"\frac13", r"3.\overline{3}"),
        (r"\frac13", r"0.\overline{3}3"), (r"\bar{x}", "x"), (r"\bar{3}", "3"), (r"\frac{1}{3}", r"0.\overline{3"), (r"\frac13", "0.(3"),
        (r"\frac13", "0.()"), (r"\frac13", r"0.\overline{}"), (r"\frac13", r"0.\overline{x}"), (r"\frac13", r"\overline{0.3}"), ("1.2", "1.(2)"),
        ("6", "2.(3)"), ("0.4", r"0.\dot4"), (r"\frac{1}{3}", "0.33333"), (r"\frac{10}{3}", r"0.\bar{3}"), (r"\frac{2}{3}", "0.667"),
        (r"\frac23", "0.67..."), ("2.5", r"2.\bar{5}"), ("2.5", "2.(5)"), (r"33.\overline{3}", "33"), (r"33.\overline{3}\%", "33.3"),
        (r"0.1\overline{6}", r"0.\overline{16}"), (r"\frac{3}{11}", r"0.\dot{2}7"), (r"\frac{61}{495}", r"0.\dot{1}2\dot{3}"),
        (r"\frac{61}{495}", r"0.12\dot3"), (r"0.\overline{AB}", r"0.\overline{BA}"), (r"0.12\overline{3}", "0.123"), (r"\frac{1}{2}", "0.5..."),
        ("0.272727", r"\frac{3}{11}"), (r"\frac{3}{11}", "0.2727"), (r"\frac{3}{11}", "0.27..."), ("1, 2, 3", "1, 2, 3, ..."),
        ("1,2,3", r"1,2,3,\ldots"), ("0.101001", "0.101001..."), (r"\frac{1}{9}", "0.11..."), ("0.12", "0.12..."), (r"\frac{4}{33}", "0.12..."),
        (r"\frac{3}{25}", "0.12..."), ("0.3", "0.3 repeating"), ("0", "0,(3)"), ("0, 3", "0,(3)"), (r"\frac{1}{3}", "0,3"),
        (r"\frac13", r"0,\overline{2}"), (r"\frac13", r"\frac{1}{0.\overline{3}}"), ("(1,250, 3,400)", "(1250,340)"), ("P(3)=12", "P(4)=12"),
        ("P(3)=12", "3"), ("2", "f(2)=5"),
    ],
    "digits in groups": [
        (r"\frac{30000}{\pi}", r"\frac{20,00}{\pi}"), (r"\frac{30000}{\pi}", r"\frac{2,000}{\pi}"), (r"\frac{30000}{\pi}", r"\frac{20.000}{\pi}"),
        (r"\frac{20}{\pi}", r"\frac{30,000}{\pi}"), ("20", "20,000"), ("(20,0)", "20,000"), ("(1,234)", "1234"), ("1234", "(1,234)"),
        (r"\{1,234\}", "1234"), ("1234", r"\{1,234\}"), ("[1,234]", "1234"), ("1234", "[1,234]"), ("1234", "1, 234"), ("1, 234", "1234"),
        ("1,23", "123"), ("12,34", "1234"), ("1,2345", "12345"), ("1234,567", "1234567"), ("0,123", "123"), ("123", "0,123"),
        (r"\sqrt{1,000}", "100"), (r"\sqrt{10,00}", r"\sqrt{1000}"), ("2^{1,000}", "2^{100}"), (r"\binom{1,000}{2}", "4950"), ("1000", "1.000"),
        ("1.000", "1000"), (r"\frac{1,000}{3}", r"\frac{1}{3}"), ("1000,2000", "10002000"), ("(1,000,2)", "(1000,2)"), ("(1,200)", "(1200)"),
        ("(100,200)", "100200"), ("100200", "(100,200)"), ("1,000,00", "100000"), ("100,200,300", "100;200;300"), ("x_{1,000}", "x_{1}"),
        ("1,000", "1;0"), (r"\log_{2,000} 3", r"\log_{2} 3"), (r"\frac{30,000}{\pi}", r"\frac{200,000}{\pi}"), ("20,000", "200,00"),
        ("P(1,200)", "P(1200)"), ("(3,500)", "3500"), ("3500", "(3,500)"), ("3,500", "(3,500)"), ("[0,100]", "0100"), ("1000", r"1\,00"),
        ("1000", "10 00"), ("1,234.5", "1,2345"), (r"\frac{1,2}{3}", r"\frac{12}{3}"), (r"\frac{1}{2,000}", r"\frac12"), ("48,210", "48, 210"),
        (r"\{100,200\}", "100200"), (r"\sqrt{3,000}", "(3,000)"), (r"\{100,200\}", r"\{100200\}"), ("(100,200)", "(200,100)"),
        (r"\frac{30,000}{\pi}", r"\frac{2000}{\pi}"), (r"\frac{30,000}{\pi}", r"\frac{30,0000}{\pi}"), (r"\frac{30,000}{\pi}", r"\frac{20}{\pi}"),
        (r"\frac{30,000}{\pi}", r"20,\frac{000}{\pi}"), ("2,500", "2.5"), ("2,500", "25,00"), ("(1,250)", "1250"), ("a_{1,234}", "a_{1234}"),
        ("1 000", "100"), ("2 125/250", "2125/250"), (r"2\,125", "2.125"), ("(1,000, 2)", "(1,0,2)"),
    ],
    "lists in words": [
        ("3, 5, 7", "3, 5, and 8"), ("3, 5, 7", "3 and 5"), ("3, 5", "3, 5, and 7"), ("3, 5, 7", r"3, 5, \text{ and } 70"),
        ("3, 5, 7", r"3, 5, \text{ not } 7"), ("3, 5, 7", "3, 5, but not 7"), ("3 and 5", "3 and 6"), ("35", "3 and 5"), ("8", "3 and 5"),
        ("17, 45, and 80", "17, 45, and 08"), ("17, 45, and 80", "17 and 80"), ("17, 45, 80", "1745, 80"), ("3", "3 and 5"), ("3", "3 or 5"),
        ("5", r"3 \text{ or } 5"), ("3 and 5", "3"), ("3, 3, 5", "3 and 5"), ("3,5", "3 and 5 and 5"), ("(3,5)", "(5,3)"),
        ("(3,5,7)", "(3,7, and 5)"), ("(1,2) and (3,4)", "(2,1) and (3,4)"), ("(1,2), (3,4)", r"(1,2) \text{ and } (4,3)"),
        ("x=3 or x=5", "x=3 or x=6"), ("x=3 or x=5", "x=3"), ("x=1 and y=2", "x=2 and y=1"), ("x=1, y=2", r"y=1 \text{ and } x=2"),
        ("A and C", "A and B"), ("A and C", "A"), ("A, B, and C", "A, B"), (r"\text{A and C}", r"\text{A}"), ("sand", "s, d"), ("and", "3"),
        ("3", "and 3, 4"), ("3,5", "and"), ("3, 5, 7", "3, 5, and"), ("3, 5, 7", ", and"), ("3, 5, 7", "3, 5 nor 7"), ("3, 5", "neither 3 nor 5"),
        ("3, 5", "between 3 and 5"), ("3 and 5", "from 3 to 5"), ("x<3 and x>1", "x<3 or x>1"), ("x<1 or x>3", "x<1 and x>3"),
        (r"x<1 \text{ or } x>3", r"x<1 \text{ and } x>3"), ("2 and 3", "23"), ("candy", "c, dy"), ("a, b, and c", "a, b, and d"),
        ("red and blue", "red and green"), (r"\text{red and blue}", r"\text{red}"), ("brand", "br"), ("2, 3, 5", "2, 3 and 5, 7"), ("2, 3", "2+3"),
        ("1, 2", "1 and -2"), ("1,000 and 2,000", "1,000 and 200"), ("1000 and 2000", "1, 000, 2000"), ("1000, 2000", "1,000 and 2,00"),
        (r"\pm 3", "3 and 3"), (r"\pm 3", "3"), ("3, 5, 7", r"3 \text{ and } 57"), ("x^2 and x", "x^2 and 2x"), ("3 and 5", "3 and 5 or 7"),
        ("3 or 5", r"3 \text{ xor } 6"), ("1, 2, 3", "1, 2, 3, and so on"), ("1, 2, 3", r"1, 2, 3, \text{ etc.}"), ("3 cm and 5 cm", "3 m and 5 m"),
        ("3, 5", "not 3 and 5"), ("3, 5", r"\text{not } 3 \text{ and } 5"), ("3, 5", "3 and not 5"), ("7", "3, 5, and 7"), ("7", "3 + 4 and 8"),
        ("red and blue", r"\text{red and green}"), (r"\text{Alice}", "Alice and Bob"), ("A and C", r"\textbf{(A) and (B)}"),
        (r"\text{I and II}", "I and III"), (r"\text{I and II}", "I"), (r"\text{I and III only}", "I and II only"),
        (r"\text{I and III only}", "III and IV only"), (r"\text{both A and B}", "A or B"), ("2,3,5", r"\textbf{2, 3, and 6}"),
        ("3,5", r"3\text{ and }-5"), ("3 and 5", r"\text{3 and }"), ("1/2, 1/3, and 1/6", "1/2, 1/3, and 1/5"), ("x^2+1 and x-1", "x^2-1 and x+1"),
        ("3, 5", "3 and 5 are not roots"), ("7", r"x=7\text{ or }x=8"),
    ],
    "words in upright type": [
        (r"\text{odd}", "even"), (r"\text{odd}", r"\text{even}"), (r"\text{odd}", "odd function and even"), (r"\text{odd}", "not odd"),
        (r"\text{odd}", r"\text{not odd}"), (r"\text{odd}", "od"), (r"\text{odd}", "ddo"), (r"\text{odd}", "o d"), (r"\text{odd}", "dod"),
        (r"\text{odd}", "o+d+d"), (r"\text{odd}", "o d^2"), (r"\text{odd}", "od^2"), (r"\text{odd}", r"o\cdot d\cdot d"), (r"\text{ab}", "ba"),
        ("ab", r"\text{ba}"), (r"\text{cat}", "act"), ("cat", r"\text{act}"), (r"\text{Yes}", "No"), (r"\text{no}", "on"), (r"\text{True}", "false"),
        (r"\text{east}", "seat"), (r"\text{Bob}", "Rob"), (r"\text{(A)}", "B"), (r"\text{A}", r"\text{B}"), (r"\text{no solution}", "solution"),
        (r"\text{even}", r"\text{uneven}"), (r"\text{red}", "redd"), (r"\text{right triangle}", "triangle"), (r"\text{Monday}", r"\text{Mon}"),
        (r"\text{odd}", "3"), ("3", r"\text{odd}"), (r"\text{ten}", "net"), (r"\text{up}", "pu"), (r"\text{up}", "u*p+0"), (r"\text{SSS}", "SAS"),
        (r"\text{SAS}", "ASS"), (r"\text{SAS}", "SSA"), (r"\text{increasing}", "decreasing"), (r"\text{odd, even}", "even, even"),
        (r"(\text{odd}, \text{even})", "(even, odd)"), (r"\text{in}", "ni"), (r"\text{neither}", "either"), (r"\text{ABC}", "BCA"),
        (r"\text{ABC}", "ACB"), (r"\text{odd}", "odd3"), (r"\text{odd}", "3odd"), (r"\text{odd}", "odd or even"), (r"\text{cos}", "soc"),
        (r"\text{6:30 PM}", "6:30 AM"), (r"3\text{ PM}", r"3\text{ a.m.}"), (r"\text{June 20}", "June 21"), (r"\text{June 20}", "July 20"),
        (r"\text{both}", "bot"), (r"\text{converges}", "diverges"), (r"\text{prime}", "not prime"), (r"\text{Jean}", "Joan"),
        (r"\mathrm{odd}", "even"), (r"\textbf{odd}", r"\textbf{even}"), (r"\text{two}", "too"), (r"\text{set}", "3 set"),
        (r"\text{odd}", r"\text{odd}+1"), (r"\text{odd}", r"2\text{odd}"), (r"\text{red}", "der"), (r"\text{Tom}", "T om m"), (r"\text{x}", "y"),
        ("abc", r"\text{abd}"), (r"\text{cm}", "mc"), (r"\text{if}", "f i"), ("SAS", "SSA"), ("SAS", "ASA"), ("odd", "dod"),
        ("red, blue", r"\text{red}"), (r"\text{Q1}", "Q2"), (r"\text{3rd}", "3"), (r"\text{3rd}", "2rd"), (r"\text{x-axis}", "y-axis"),
        (r"\text{Type II}", "Type I"), (r"\text{12 noon}", "12 midnight"), (r"\text{increasing on }(0,1)", "increasing on (0,2)"),
        (r"\text{increasing on }(0,1)", "decreasing on (0,1)"), (r"\text{None of the above}", "all of the above"), ("7", r"AB\ne 7"), ("7", "AB>7"),
    ],
    "named quantities": [
        (r"\frac{1}{\sqrt{7}}", r"\frac{KL}{ML}=\frac{1}{\sqrt{5}}"), (r"\frac{KL}{ML}=\frac{1}{\sqrt{7}}", r"\frac{1}{\sqrt{5}}"),
        (r"\frac{KL}{ML}=\frac{1}{\sqrt{7}}", r"\sqrt{7}"), (r"\frac{KL}{ML}=\frac{1}{\sqrt{7}}", r"\frac{ML}{KL}=\frac{1}{\sqrt{7}}"),
        (r"\frac{KL}{ML}=\frac{1}{\sqrt{7}}", r"\frac{KL}{NL}=\frac{1}{\sqrt{7}}"), ("7", "8=7"), ("7", r"\frac{x}{2}=7"), ("7", r"\frac{AB}{2}=7"),
        ("7", "2AB=7"), ("7", "x-3=7"), ("7", "6=7"), ("7", "AB=8"), ("7", r"\angle A = 8"), ("7", "f(2)=8"), ("2", "f(2)=8"), ("7", "f(7)=2"),
        ("7", r"\frac{AB}{CD}=8=7"), ("7", r"\frac{AB}{CD}=7=8"), ("7", r"\frac{7}{1}=8"), ("7", "x=7=8"), ("7", "x=8=7"), ("7", "a_7=8"),
        ("7", "a_7"), ("5", "a_5=7"), ("7", "AB=CD"), ("7", r"\frac{AB}{CD}"), ("7", "P(A)=P(B)"), ("7", "x=7, y=8"), ("7", "x=7x"),
        ("7", r"\frac{14}{2}=8"), ("7", "1=7"), ("7", r"\pi=7"), ("7", r"\sqrt{49}=8"), ("7", r"\pi = 7"), ("7", r"\infty=7"), ("7", r"\sqrt{x}=7"),
        ("7", r"\sqrt{AB}=7"), ("7", r"x\ne 7"), ("7", "x<7"), ("7", "AB<7"), ("7", r"AB\ne 7"), ("7", r"\frac{AB}{CD}\ne 7"),
        ("7", r"\frac{AB}{CD}\le 7"), ("7", r"\frac{1}{x}=7"), ("7", r"\frac{1}{AB}=7"), ("7", r"\frac{2x}{y}=7"), ("7", "-x=7"), ("7", "-AB=7"),
        ("7", "3x+y=7"), ("7", "x^3=7"), ("AB=7", "CD=7"), ("x=7", "y=7"), (r"\angle A=60^\circ", r"\angle B=60^\circ"),
        (r"P(A)=\frac13", r"P(B)=\frac13"), ("a_5=7", "a_6=7"), ("f(2)=3", "f(3)=2"), ("f(2)=3", "f(3)=3"), ("f(2)=3", "f(2)=4"), ("f(2)=3", "2"),
        (r"\frac{AB}{CD}=\frac23", r"\frac32"), (r"\frac{AB}{CD}=\frac23", r"\frac{CD}{AB}=\frac23"),
        (r"\frac{x}{y}=\frac23", r"\frac{y}{x}=\frac23"), (r"\frac{x}{2}=3", "3"), ("x^2=9", "9"), ("2x=8", "8"), ("x+1=8", "8"), ("3x+2y=6", "6"),
        ("x^2+y^2=25", "25"), ("25", "x^2+y^2=25"), ("6", "3x+2y=6"), ("1", r"\frac{x^2}{4}+\frac{y^2}{9}=1"),
        (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "1"), ("x+y=7", "x+y=8"), ("x-y=0", "0"), ("0", "x-y=0"), ("0", "2x+3=0"), ("2x+3=0", "0"),
        ("x+2y-5=0", "0"), ("x+2y=5", "5"), ("5", "x+2y=5"), ("y=3x", "3"), ("3", "y=3x"), ("4", r"\frac{x}{y}=4x"),
        (r"\sin x=\frac12", r"\frac{1}{3}"), (r"\frac{1}{2}", r"\sin 30^\circ=\frac13"), (r"\frac12", r"\sin\frac12=x"), ("7", r"\text{not } x=7"),
        ("7", r"\text{7 = false}"), ("x=7", "x=-7"), ("7", "7=0"), ("7", r"x=\pm7"), ("7", r"AB=\pm 7"),
        (r"\frac{AB}{CD}=2", r"\frac{AB}{CD}=\frac12"), ("2:3", "AB:CD=3:2"), ("AB:CD=2:3", "CD:AB=2:3"), ("AB:CD=2:3", "3:2"),
        ("7", r"\frac{0}{0}=7"), ("7", r"\frac{1}{2}=7"), ("7", r"\frac{3}{4}=7"), ("7", r"\frac{12}{AB}=7"),
        (r"\frac{AB}{CD}=\frac{AB}{2}", r"\frac12"), ("(2,3)", "(x,y)=(3,2)"), ("(2,3)", "(x,y)=(2,4)"), ("7", r"\log x = 7"), ("7", r"\ln x=7"),
        ("7", "x!=7"), ("7", r"\frac{xy}{2}=7"), ("xy=12", "x+y=12"), ("AB=BC", "AB"), (r"\angle A=\angle B", r"\angle A"), ("AB=5", "|AC|=5"),
        (r"\overline{AB}=5", "AC=5"), (r"m\angle A=60", r"\angle B=60^\circ"), (r"P(A)=\frac13", r"\Pr(B)=\frac13"),
        ("12", r"A=\frac12\cdot 6\cdot 5=12"), ("12", r"A=\frac12 bh=\frac12\cdot 6\cdot 5=12"), ("12", "x=2x=12"), ("12", "x=12x=12"),
        ("7", r"\frac{AB}{CD}=\frac{21}{4}=7"), ("7", r"\text{not}=7"), ("7", r"\frac{AB}{CD}=7x"), (r"\frac{a}{b}", r"\frac{b}{a}=x"),
        (r"\frac{a}{b}=\frac{2}{3}", "3/2"), ("a_{10}=55", "a_{11}=55"), ("55", "F_{55}=10"), ("x=5", "5=y"), ("7", r"\log_2 x=7"),
        ("7", "AB^2=14=7"), ("7", r"\frac{x+1}{2}=7"), ("7", r"\frac{2}{x}=7"), ("7", r"\frac{x}{7}=7"), ("7", r"\frac{3}{AB}=7"), ("7", "x+7=7"),
        ("7", "7x=7"), ("0", r"\frac{x}{y}-7=0"), ("7", "|x|=7"), ("7", "x=-7"), ("7", "x=7, x=-7"), (r"\frac12", r"\sin x=2"),
        ("60", r"\angle A=30^\circ"), ("60", r"\sin 60=\frac{\sqrt{3}}{2}"), ("7", "P(A)=P(B)=8"), ("7", "k=m=32"),
        ("7", r"\frac{AB}{CD}=\frac{EF}{GH}"), ("5", r"\frac{5}{AB}=5"), ("x=1,y=2", "x=2,y=1"),
        (r"\det(M)=\cos^2 u+\sin^2 u=1", r"\det(M)=\cos^2 u-\sin^2 u=1"),
        (r"It is regular, since \det(M)=\cos^2 u+\sin^2 u=1", r"It is regular, since \det(M)=\cos^2 u-\sin^2 u=1"),
    ],
    "choices with their text": [
        ("B", r"\textbf{(C)}\ 24"), ("B", "(B) or (C)"), ("B", "(B) 12, (C) 13"), ("B", "(B)(C)"), ("A", "(A)+(B)"), ("A", "(A)^2"), ("A", "(A) - 3"),
        ("24", "(B) 12"), ("B", "12"), ("B", r"(B) 12 \text{ or } 13"), ("A", r"(A)\cup(B)"), ("B", r"\text{not }(B) 12"), ("B", "(B)12 = C"),
    ],
    "brackets that are factors": [
        ("12", "x(x+1)=12"), ("12", "12=x(x+1)"), ("12", r"x\left(x+1\right)=12"), ("12", "x (x+1) = 12"), ("12", "n(n-1)=12"), ("12", "a(b+c)=12"),
        ("12", "x[x+1]=12"), ("0", "x(x+1)=0"), ("0", "0=x(x-1)"), ("12", "x(2x)=12"), ("12", "x(x)=12"), ("12", "a(2b)=12"), ("12", "a(b^2)=12"),
        ("12", "x(y^{2})=12"), ("12", "h(h+1)=12"), ("12", "y(y-1)=12"), ("12", "T(T+1)=12"), ("12", "f(f+1)=12"), ("12", "P(P-1)=12"),
        ("12", "a_1(1+r)=12"), ("12", "x_1(x_2+1)=12"), ("12", "k(3-1)=12"), ("12", r"\lambda(\lambda+1)=12"), ("12", r"\alpha(\beta+1)=12"),
        ("12", "AB(BC+CD)=12"), ("12", r"\overline{AB}(x+1)=12"), ("12", "|x|(x+1)=12"), ("12", "xyz(x+y+z)=12"), ("12", "x'(x+1)=12"),
        ("12", r"\frac{x(x+1)}{y}=12"), ("12", r"n(n+1)=4\cdot 3=12"), ("12", "x(x+1)=12, y=3"), ("12", "s(s-a)=12"), ("x(x+1)=12", "12"),
        ("n(n-1)=30", "30"), ("a(b+c)=12", "12"), ("12=x(x+1)", "12"), ("x(x+1)=0", "0"), ("12", r"m(1+\frac{1}{n})=12"), ("12", "abc(d+e)=12"),
        ("12", r"a(\frac{b}{2})=12"), ("12", r"a(\sqrt{b}+1)=12"),
    ],
    "sums and products of names": [
        ("17", "2x+3y=17"), ("17", "x+2y=17"), ("17", "2x=17"), ("17", "2xy=17"), ("17", "x^2+y^2=17"), ("17", "x^2-y=17"), ("17", "x+y^2=17"),
        ("17", "x+1=17"), ("17", "x+y+1=17"), ("17", "0=17"), ("17", "17=0"), ("17", "8+8=17"), ("17", "x+x=17"), ("17", "x-x=17"), ("17", "xx=17"),
        ("17", "x+y+x=17"), ("17", "-x-y=17"), ("17", "-x+y=17"), ("17", "xy+yz+zx=17"), ("17", "(x+y)z=17"), ("17", r"\pi+a=17"),
        ("17", r"\pi r=17"), ("17", "a+e=17"), ("17", "ei=17"), ("17", "e+i=17"), ("17", "a+bi=17"), ("17", "e^x=17"), ("17", r"\sin x+y=17"),
        ("17", "cos=17"), ("17", "ln=17"), ("17", r"\sqrt{x}+y=17"), ("17", r"\frac{x}{2}+y=17"), ("17", r"\frac{x}{a}+\frac{y}{b}=17"),
        ("17", "|x|+|y|=17"), ("17", "x!+y=17"), ("17", r"a+b\ne 17"), ("17", "a+b<17"), ("17", r"a+b\in 17"), ("17", "no+x=17"), ("17", "a+b+c=18"),
        ("17", "m+n=17=18"), ("17", "m+n=18=17"), ("17", "m+n=-17"), ("17", "m+n=7"), ("17", "m+n=17x"), ("17", "m+n"), ("17", "m+n=p+q"),
        ("17", r"a+b=\pm 17"), ("17", "m+n=17, p=3"), ("0", "x-y=0"), ("0", "x+y=0"), ("0", "xy=0"), ("0", "0=x+y"), ("x", "a+b=x"),
        ("2x+1", "a+b=2x+1"), ("c", "a+b=c"), ("(1,2)", "a+b=(1,2)"), ("x+y=17", "x-y=17"), ("x+y=17", "x=17"), ("x=17", "x+y=17"),
    ],
    "phrases before the answer": [
        ("5", r"\text{The answer is not } 5"), ("5", r"\text{It is false that the answer is } 5"), ("5", r"\text{The answer is never } 5"),
        ("5", r"\text{The area is }5\text{ and the perimeter is }6"), (r"\text{yes}", r"\text{The answer is no.}"),
        (r"\text{if and only if } n=3", "n=3"), ("5", r"\text{The answer isn't what it is } 5"), ("12", r"\text{The area is }13"),
        ("7", r"\text{Thus, } x=8"), (r"\text{no}", r"\text{The answer is none}"),
    ],
    "radians": [
        (r"45^\circ", r"45\text{ radians}"), (r"2^\circ", r"2\text{ rad}"), (r"2\text{ rad}", r"2^\circ"), (r"\frac{\pi}{4}", r"\frac{\pi}{4}^\circ"),
        (r"5\text{ rad}", r"5\text{ cm}"),
    ],
    "rows with more space": [
        (r"\begin{pmatrix}1/2\\-3\end{pmatrix}", r"\begin{pmatrix}\frac12\\[4pt]3\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[2]\end{pmatrix}"),
    ],
    "numbers with a base": [
        ("2102_{3}", "(2102)_4"), ("2102_{3}", "(2012)_3"), ("3A7_{16}", r"3\text{B}7_{16}"), ("3A7_{16}", "3A7"), ("2102_3", "2102"),
    ],
    "functions of angles, sizes of numbers": [
        (r"\frac12", r"\sin 2x=\frac12"), (r"\sin 2\alpha=\frac{24}{25}", r"\frac{7}{25}"), ("7", "|x|=7"), ("7", "|x+y|=7"), ("5", "|z|=6"),
        (r"\sin 2\alpha=\frac12", r"\cos 2\alpha=\frac12"), ("2", r"\sin 2\alpha"), (r"\frac12", r"2\sin\alpha=\frac12"),
    ],
    "references that name a sum": [
        ("x+y=113", "113"), ("m+n=113", "112"), ("2m+n=113", "113"), ("xy=12", "12"), ("m+n=0", "0"), ("m+n=p", "p"),
    ],
    "ratios upside down": [
        (r"\frac{AB}{CD}=\frac32", r"\frac{CD}{AB}=\frac32"), (r"\frac{AB}{CD}=\frac32", r"\frac{CD}{EF}=\frac23"),
        (r"\frac{AB}{CD}=\frac32", r"\frac{CD}{AB}=\frac25"), (r"\frac{x}{2}=3", r"\frac{2}{x}=3"), (r"\frac{x}{y}=0", r"\frac{y}{x}=0"),
    ],
    "phrases without a verb": [
        (r"\frac16", r"\text{Not the probability: }\frac16"), ("x>2", r"\text{all } x \ge 2"), ("x>2", r"\text{not all } x > 2"),
        ("5", r"\text{all but } 5"), ("-6, 4", "x = 4 \\\\\nx = 6"), (r"1\,0110_2", r"10111_{\text{two}}"), ("5", r"\text{wrong value: } 5"),
    ],
    "infinitely many": [
        (r"\text{infinitely many}", r"\text{no solutions}"), (r"\text{infinitely many}", r"\text{finitely many}"),
    ],
}  # fmt: skip


def judged_other_than(wanted, pairs):
    return [pair for pair in pairs if (outcome(*pair).status == "right") is not wanted]


@pytest.mark.parametrize("notation", RIGHT)
def test_another_notation_of_the_answer_is_right(notation):
    assert judged_other_than(True, RIGHT[notation]) == []


@pytest.mark.parametrize("notation", WRONG)
def test_a_near_miss_in_that_notation_is_not(notation):
    assert judged_other_than(False, WRONG[notation]) == []
